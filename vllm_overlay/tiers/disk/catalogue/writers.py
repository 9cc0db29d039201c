# SPDX-License-Identifier: Apache-2.0
"""Namespaces, and the writers that serve them.

A *writer* is one life of one engine; its row says which namespace it serves and what it was granted. Nobody asks for
locks here: who has seen that a writer is dead buries it.
"""

import sqlite3
from collections.abc import Iterable

import msgspec

from vllm_overlay.tiers.disk.catalogue.errors import Damaged, Superseded
from vllm_overlay.tiers.disk.catalogue.rows import (
    Fingerprint,
    Flag,
    Id,
    NumBytes,
    WriterId,
    check_value,
    name_of,
    read_all,
    read_value,
)
from vllm_overlay.tiers.disk.catalogue.schema import MAX_LEARNED_BYTES, MAX_WORDS_BYTES

MAX_NAMESPACES = 10_000
_MAX_WRITERS = 100_000


class Namespace(msgspec.Struct, frozen=True):
    """One model. ``words`` is JSON for people; empty where nobody knows it. Nobody else serves a private one."""

    fingerprint: str
    words: str = ""
    is_private: bool = False


class WriterRow(msgspec.Struct, frozen=True):
    """``granted`` are bytes for files that are no objects yet. Without ``fingerprint`` it has ended."""

    name: str
    fingerprint: str | None
    granted: int


class NamespaceRow(msgspec.Struct, array_like=True, frozen=True):
    id: Id
    fingerprint: Fingerprint
    is_private: Flag


# Namespaces.


def check_namespace(namespace: Namespace) -> None:
    """Raise ValueError unless its row could be read back."""
    check_value(Fingerprint, namespace.fingerprint)
    if len(namespace.words.encode()) > MAX_WORDS_BYTES:
        raise ValueError(f"the words of a namespace have at most {MAX_WORDS_BYTES} bytes")


def read_namespaces(db: sqlite3.Connection) -> dict[int, NamespaceRow]:
    """All of them, by number."""
    found = db.execute("SELECT id, fingerprint, is_private FROM namespace LIMIT ?", (MAX_NAMESPACES + 1,))
    rows = read_all(NamespaceRow, found)
    if len(rows) > MAX_NAMESPACES:
        raise Damaged(f"it has more than {MAX_NAMESPACES} namespaces")
    return {row.id: row for row in rows}


def find_namespace(db: sqlite3.Connection, fingerprint: str) -> int | None:
    """Its number; None when it is not there."""
    row = db.execute("SELECT id FROM namespace WHERE fingerprint = ?", (fingerprint,)).fetchone()
    return None if row is None else int(read_value(Id, row))


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


def learned(db: sqlite3.Connection, fingerprint: str) -> bytes | None:
    """What eviction has learned of it."""
    row = db.execute("SELECT learned FROM namespace WHERE fingerprint = ?", (fingerprint,)).fetchone()
    return None if row is None else read_value(bytes | None, row)


def keep_learned(db: sqlite3.Connection, fingerprint: str, words: bytes) -> None:
    """Nothing is kept of a namespace that is not there. Raises ValueError for too much."""
    if len(words) > MAX_LEARNED_BYTES:
        raise ValueError(f"what was learned of a namespace has at most {MAX_LEARNED_BYTES} bytes")
    db.execute("UPDATE namespace SET learned = ? WHERE fingerprint = ?", (words, fingerprint))


def _drop_unused_namespaces(db: sqlite3.Connection) -> None:
    """Those that nobody serves and that have no object, with what was learned of them. Not before all files are
    known."""
    db.execute(
        "DELETE FROM namespace WHERE (SELECT is_complete FROM meta)"
        " AND NOT EXISTS (SELECT 1 FROM writer WHERE writer.namespace = namespace.id)"
        " AND NOT EXISTS (SELECT 1 FROM object INDEXED BY object_name WHERE object.namespace = namespace.id)"
    )


# Writers.


def join(db: sqlite3.Connection, writer: int, namespace: Namespace) -> None:
    """A writer serves this from now on. What it was granted stays its own."""
    number = add_namespace(db, namespace)
    db.execute("INSERT OR IGNORE INTO writer VALUES (?, NULL, 0)", (writer,))
    db.execute("UPDATE writer SET namespace = ? WHERE id = ?", (number, writer))
    _drop_unused_namespaces(db)


def leave(db: sqlite3.Connection, writer: int, in_flight_bytes: int) -> None:
    """It serves no more. What it has to unlink is anybody's; what it may still write stays granted."""
    db.execute("UPDATE garbage SET collector = NULL WHERE collector = ?", (writer,))
    db.execute("UPDATE writer SET namespace = NULL, granted = min(granted, ?) WHERE id = ?", (in_flight_bytes, writer))
    db.execute("DELETE FROM writer WHERE id = ? AND granted = 0", (writer,))
    _drop_unused_namespaces(db)


def bury(db: sqlite3.Connection, writer: int, heir: int) -> int:
    """It is dead and its directory has nothing that no row names; returns what it was granted."""
    read_grant(db, heir)
    row = db.execute("SELECT granted FROM writer WHERE id = ?", (writer,)).fetchone()
    num_bytes = 0 if row is None else int(read_value(NumBytes, row))
    db.execute("UPDATE garbage SET collector = ? WHERE collector = ?", (heir, writer))
    db.execute("DELETE FROM writer WHERE id = ?", (writer,))
    _drop_unused_namespaces(db)
    return num_bytes


def read_writers(db: sqlite3.Connection) -> list[WriterRow]:
    """All rows, of the living, the dead and those that left something granted."""
    rows = db.execute(
        "SELECT writer.id, fingerprint, granted FROM writer LEFT JOIN namespace ON namespace.id = writer.namespace"
        " ORDER BY writer.id LIMIT ?",
        (_MAX_WRITERS,),
    )
    found = read_all(tuple[WriterId, Fingerprint | None, NumBytes], rows)
    return [WriterRow(name_of(number), fingerprint, granted) for number, fingerprint, granted in found]


def served(db: sqlite3.Connection) -> set[int]:
    """The namespaces that writers serve, of whom nobody knows that they are dead."""
    rows: Iterable[tuple[int]] = db.execute("SELECT DISTINCT namespace FROM writer WHERE namespace IS NOT NULL")
    return {number for (number,) in read_all(tuple[Id], rows)}


def read_grant(db: sqlite3.Connection, writer: int) -> int:
    """The bytes that a writer has for files which are no objects yet. Raises Superseded when it has no row."""
    row = db.execute("SELECT granted FROM writer WHERE id = ?", (writer,)).fetchone()
    if row is None:
        raise Superseded(f"writer {name_of(writer)} has no row any more: join anew")
    return int(read_value(NumBytes, row))


def write_grant(db: sqlite3.Connection, writer: int, num_bytes: int) -> None:
    db.execute("UPDATE writer SET granted = ? WHERE id = ?", (num_bytes, writer))


def act_as(db: sqlite3.Connection, writer: int | None) -> None:
    """Who has to unlink what this transaction makes garbage; None: whoever asks first."""
    db.execute("UPDATE meta SET actor = ? WHERE actor IS NOT ?", (writer, writer))
