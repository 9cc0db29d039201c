# SPDX-License-Identifier: Apache-2.0
"""How many objects and bytes each namespace has, for tools and metrics."""

import sqlite3
from dataclasses import dataclass, field

from vllm_overlay.tiers.disk.catalogue.errors import Damaged
from vllm_overlay.tiers.disk.catalogue.rows import Flag, Id, Kind, NumBytes, Seconds, read_all
from vllm_overlay.tiers.disk.catalogue.writers import read_namespaces, served


@dataclass(slots=True)
class NamespaceUsage:
    """``kinds`` has [objects, bytes] for each kind. Times are in seconds since the epoch."""

    fingerprint: str
    words: str
    is_private: bool
    has_learned: bool
    is_served: bool
    num_objects: int = 0
    num_bytes: int = 0
    oldest_use: int | None = None
    newest_use: int | None = None
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, kind: str, num_objects: int, num_bytes: int, oldest: int, newest: int) -> None:
        self.num_objects += num_objects
        self.num_bytes += num_bytes
        self.oldest_use = oldest if self.oldest_use is None else min(oldest, self.oldest_use)
        self.newest_use = newest if self.newest_use is None else max(newest, self.newest_use)
        self.kinds[kind] = num_objects, num_bytes


def measure(db: sqlite3.Connection) -> list[NamespaceUsage]:
    """One a namespace, the largest first. Reads every row."""
    serving = served(db)
    namespaces = read_namespaces(db)
    beside = db.execute("SELECT id, words, learned IS NOT NULL FROM namespace")
    usages = {
        number: NamespaceUsage(row.fingerprint, words, bool(row.is_private), bool(has_learned), number in serving)
        for number, words, has_learned in read_all(tuple[Id, str, Flag], beside)
        if (row := namespaces.get(number)) is not None
    }
    rows = db.execute(
        "SELECT namespace, kind, count(*), sum(num_bytes), min(last_use), max(last_use) FROM object NOT INDEXED"
        " GROUP BY namespace, kind LIMIT 100000"
    )
    for namespace, kind, num_objects, num_bytes, oldest, newest in read_all(
        tuple[Id, Kind, NumBytes, NumBytes, Seconds, Seconds], rows
    ):
        if namespace not in usages:
            raise Damaged(f"there is no namespace {namespace}")
        usages[namespace].add(kind, num_objects, num_bytes, oldest, newest)
    return sorted(usages.values(), key=lambda usage: -usage.num_bytes)
