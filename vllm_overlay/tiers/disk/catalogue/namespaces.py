# SPDX-License-Identifier: Apache-2.0
"""Namespaces: who is served, what eviction has learned of them, and what each takes."""

import sqlite3
from dataclasses import dataclass, field

import msgspec

from vllm_overlay.tiers.disk.catalogue import rows
from vllm_overlay.tiers.disk.catalogue.connection import LONG_CALLS, Connection
from vllm_overlay.tiers.disk.catalogue.errors import Damaged
from vllm_overlay.tiers.disk.catalogue.rows import Fingerprint, Flag, Id, NumBytes, Seconds, read_all, read_value
from vllm_overlay.tiers.disk.catalogue.schema import MAX_LEARNED_BYTES, MAX_WORDS_BYTES

MAX_NAMESPACES = 100_000
"""Resets may leave thousands; a forged file must not fill a tool's memory."""


class Namespace(msgspec.Struct, frozen=True):
    """One model. ``words`` is JSON for people; empty where nobody knows it. Nobody else serves a private one."""

    fingerprint: str
    words: str = ""
    is_private: bool = False


@dataclass(slots=True)
class NamespaceUsage:
    """``kinds`` has [objects, bytes] for each kind. Times are in seconds since the epoch."""

    fingerprint: str
    words: str
    is_private: bool
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


class Namespaces(Connection):
    """See ``Catalogue``."""

    def learned(self, fingerprint: str) -> bytes | None:
        """What eviction has learned of a namespace."""
        with self.reading() as db:
            row = db.execute("SELECT learned FROM namespace WHERE fingerprint = ?", (fingerprint,)).fetchone()
            return None if row is None else read_value(bytes | None, row)

    def keep_learned(self, fingerprint: str, learned: bytes) -> None:
        """Keep it for the next start, at most 16 KiB; nothing of a namespace that is not there."""
        if len(learned) > MAX_LEARNED_BYTES:
            raise ValueError(f"what was learned of a namespace has at most {MAX_LEARNED_BYTES} bytes")
        with self.writing() as db:
            db.execute("UPDATE namespace SET learned = ? WHERE fingerprint = ?", (learned, fingerprint))

    def usage(self) -> list[NamespaceUsage]:
        """One a namespace, the largest first, for tools. Reads every row."""
        with self.reading(LONG_CALLS) as db:
            serving = served(db)
            statement = "SELECT id, fingerprint, words, is_private FROM namespace LIMIT ?"
            every = read_all(tuple[Id, Fingerprint, str, Flag], db.execute(statement, (MAX_NAMESPACES + 1,)))
            if len(every) > MAX_NAMESPACES:
                raise Damaged(f"it has more than {MAX_NAMESPACES} namespaces")
            usages = {
                each: NamespaceUsage(fingerprint, words, bool(is_private), each in serving)
                for each, fingerprint, words, is_private in every
            }
            kinds = db.execute(
                "SELECT namespace, kind, count(*), sum(num_bytes), min(last_use), max(last_use) FROM object NOT INDEXED"
                " GROUP BY namespace, kind LIMIT 100000"
            )
            for namespace, kind, num_objects, num_bytes, oldest, newest in read_all(
                tuple[Id, rows.Kind, NumBytes, NumBytes, Seconds, Seconds], kinds
            ):
                if namespace not in usages:
                    raise Damaged(f"there is no namespace {namespace}")
                usages[namespace].add(kind, num_objects, num_bytes, oldest, newest)
            return sorted(usages.values(), key=lambda usage: -usage.num_bytes)


def check_namespace(namespace: Namespace) -> None:
    """Raise ValueError unless its row could be read back."""
    rows.check_value(Fingerprint, namespace.fingerprint)
    if len(namespace.words.encode()) > MAX_WORDS_BYTES:
        raise ValueError(f"the words of a namespace have at most {MAX_WORDS_BYTES} bytes")


def find_namespace(db: sqlite3.Connection, fingerprint: str) -> int | None:
    """Its number; None when it is not there."""
    row = db.execute("SELECT id FROM namespace WHERE fingerprint = ?", (fingerprint,)).fetchone()
    return None if row is None else int(read_value(Id, row))


def fingerprint_of(db: sqlite3.Connection, number: int) -> str:
    """Raises Damaged where there is no such namespace."""
    row = db.execute("SELECT fingerprint FROM namespace WHERE id = ?", (number,)).fetchone()
    return str(read_value(Fingerprint, row))


def add_namespace(db: sqlite3.Connection, namespace: Namespace) -> int:
    """Its number. What was known of it stays, words take the place of none."""
    db.execute(
        "INSERT INTO namespace (fingerprint, words, is_private) VALUES (?, ?, ?) ON CONFLICT (fingerprint) DO UPDATE"
        " SET words = CASE excluded.words WHEN '' THEN words ELSE excluded.words END,"
        " is_private = max(is_private, excluded.is_private)",
        (namespace.fingerprint, namespace.words, int(namespace.is_private)),
    )
    if (number := find_namespace(db, namespace.fingerprint)) is None:
        raise Damaged(f"namespace {namespace.fingerprint} cannot be kept")
    return number


def drop_unused(db: sqlite3.Connection) -> None:
    """Those that nobody serves and that have no object, with what was learned of them. Not before all files are
    known."""
    db.execute(
        "DELETE FROM namespace WHERE (SELECT is_complete FROM meta)"
        " AND NOT EXISTS (SELECT 1 FROM writer WHERE writer.namespace = namespace.id)"
        " AND NOT EXISTS (SELECT 1 FROM object INDEXED BY object_name WHERE object.namespace = namespace.id)"
    )


def served(db: sqlite3.Connection) -> set[int]:
    """The namespaces that writers serve, of whom nobody knows that they are dead."""
    found = db.execute("SELECT DISTINCT namespace FROM writer WHERE namespace IS NOT NULL")
    return {number for (number,) in read_all(tuple[Id], found)}
