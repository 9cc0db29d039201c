# SPDX-License-Identifier: Apache-2.0
"""How many objects and bytes each namespace has, for tools and metrics."""

import sqlite3
from collections.abc import Set
from dataclasses import dataclass, field

from vllm_overlay.tiers.disk.catalogue.namespaces import Namespaces
from vllm_overlay.tiers.disk.catalogue.rows import Id, NumBytes, Seconds, Tag, read_all


@dataclass(slots=True)
class NamespaceUsage:
    """``kinds`` has [objects, bytes] for each tag. Times are in seconds since the epoch."""

    fingerprint: str
    partner: str
    is_served: bool
    is_temporary: bool
    served_at: int
    num_objects: int = 0
    num_bytes: int = 0
    oldest_use: int | None = None
    newest_use: int | None = None
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, tag: str, num_objects: int, num_bytes: int, oldest: int, newest: int) -> None:
        self.num_objects += num_objects
        self.num_bytes += num_bytes
        self.oldest_use = oldest if self.oldest_use is None else min(oldest, self.oldest_use)
        self.newest_use = newest if self.newest_use is None else max(newest, self.newest_use)
        self.kinds[tag] = num_objects, num_bytes


def measure(db: sqlite3.Connection, served: Set[int]) -> list[NamespaceUsage]:
    """One a namespace, the largest first. Reads every row. ``served`` are the namespaces that living members serve."""
    namespaces = Namespaces(db)
    usages = {
        row.id: NamespaceUsage(
            row.fingerprint,
            namespaces.fingerprint_of(row.parents_id),
            row.id in served,
            bool(row.is_temporary),
            row.served_at,
        )
        for row in namespaces.by_id.values()
    }
    rows = db.execute(
        "SELECT namespace, tag, count(*), sum(num_bytes), min(last_use), max(last_use) FROM object NOT INDEXED"
        " GROUP BY namespace, tag LIMIT 100000"
    )
    for namespace, tag, num_objects, num_bytes, oldest, newest in read_all(
        tuple[Id, Tag, NumBytes, NumBytes, Seconds, Seconds], rows
    ):
        namespaces.fingerprint_of(namespace)
        usages[namespace].add(tag, num_objects, num_bytes, oldest, newest)
    return sorted(usages.values(), key=lambda usage: -usage.num_bytes)
