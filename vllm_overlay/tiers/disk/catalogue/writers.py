# SPDX-License-Identifier: Apache-2.0
"""Writers, and the bytes that they may still write.

A *writer* is one life of one engine; its row says which namespace it serves and what it was granted. Nobody asks for
locks here: who has seen that a writer is dead buries it.

Objects, grants and files that are being unlinked stay within the capacity together. A grant that nobody uses is room
that nobody has, so all writers together may hold a 32nd of the capacity, each its equal part of that.
"""

import sqlite3
from dataclasses import dataclass

import msgspec

from vllm_overlay.tiers.disk.catalogue.errors import Superseded
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespace, add_namespace, drop_unused
from vllm_overlay.tiers.disk.catalogue.rows import (
    Fingerprint,
    Flag,
    NumBytes,
    Seconds,
    WriterId,
    name_of,
    read_all,
    read_one,
    read_value,
)

HELD_PARTS = 32
_MAX_WRITERS = 100_000
_TOTALS = (
    "SELECT num_bytes, (SELECT coalesce(sum(granted), 0) FROM writer),"
    " (SELECT coalesce(sum(num_bytes), 0) FROM garbage), num_objects, (SELECT count(namespace) FROM writer),"
    " is_complete, newest_use FROM meta WHERE id = 1"
)


class WriterRow(msgspec.Struct, frozen=True):
    """``granted`` are bytes for files that are no objects yet. Without ``fingerprint`` it has ended."""

    name: str
    fingerprint: str | None
    granted: int


class Totals(msgspec.Struct, array_like=True, frozen=True):
    """In bytes. ``granted_bytes`` is for files that are no objects yet, ``removing_bytes`` are files to unlink.

    ``num_writers`` serve a namespace. ``is_complete`` is 0 until a rebuild has told the catalogue of all files.
    ``newest_use`` is the latest that anything was used at: time does not go back behind it.
    """

    object_bytes: NumBytes
    granted_bytes: NumBytes
    removing_bytes: NumBytes
    num_objects: NumBytes
    num_writers: NumBytes
    is_complete: Flag
    newest_use: Seconds

    @property
    def num_bytes(self) -> int:
        """What files may take at most."""
        return self.object_bytes + self.granted_bytes + self.removing_bytes


@dataclass(frozen=True, slots=True)
class Grant:
    """In bytes. ``num_bytes`` were added to what the writer holds.

    ``short_bytes`` more would have been, were there room: evict as many. ``surplus_bytes`` are more than the writer's
    part by now: give back what is not being written.
    """

    num_bytes: int
    short_bytes: int = 0
    surplus_bytes: int = 0


def join(db: sqlite3.Connection, writer: int, namespace: Namespace) -> None:
    """A writer serves this from now on. What it was granted stays its own."""
    number = add_namespace(db, namespace)
    db.execute("INSERT OR IGNORE INTO writer VALUES (?, NULL, 0)", (writer,))
    db.execute("UPDATE writer SET namespace = ? WHERE id = ?", (number, writer))
    drop_unused(db)


def leave(db: sqlite3.Connection, writer: int, in_flight_bytes: int) -> None:
    """It serves no more. What it has to unlink is anybody's; what it may still write stays granted."""
    db.execute("UPDATE garbage SET collector = NULL WHERE collector = ?", (writer,))
    db.execute("UPDATE writer SET namespace = NULL, granted = min(granted, ?) WHERE id = ?", (in_flight_bytes, writer))
    db.execute("DELETE FROM writer WHERE id = ? AND granted = 0", (writer,))
    drop_unused(db)


def bury(db: sqlite3.Connection, writer: int, heir: int) -> int:
    """It is dead and its directory has nothing that no row names; returns what it was granted."""
    read_grant(db, heir)
    row = db.execute("SELECT granted FROM writer WHERE id = ?", (writer,)).fetchone()
    num_bytes = 0 if row is None else int(read_value(NumBytes, row))
    db.execute("UPDATE garbage SET collector = ? WHERE collector = ?", (heir, writer))
    db.execute("DELETE FROM writer WHERE id = ?", (writer,))
    drop_unused(db)
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


# Room.


def read_totals(db: sqlite3.Connection) -> Totals:
    """Counters, and sums over writers and garbage: takes no time that grows with the number of objects."""
    return read_one(Totals, db.execute(_TOTALS).fetchone())


def is_complete(db: sqlite3.Connection) -> bool:
    """Whether the catalogue knows all files: no rebuild is under way."""
    return bool(read_value(Flag, db.execute("SELECT is_complete FROM meta WHERE id = 1").fetchone()))


def limit_bytes(totals: Totals, capacity_bytes: int, at_least: int) -> int:
    """What one writer may hold: its part, but always ``at_least``, which one object takes."""
    return max(at_least, capacity_bytes // HELD_PARTS // max(1, totals.num_writers))


def grant(db: sqlite3.Connection, writer: int, num_bytes: int, at_least: int, capacity_bytes: int) -> Grant:
    """Add up to ``num_bytes`` to what a writer holds; nothing while a rebuild is under way."""
    totals, held = read_totals(db), read_grant(db, writer)
    if not totals.is_complete:
        return Grant(0)
    limit = limit_bytes(totals, capacity_bytes, at_least)
    wanted = min(num_bytes, max(0, limit - held))
    granted = max(0, min(wanted, capacity_bytes - totals.num_bytes))
    if granted:
        write_grant(db, writer, held + granted)
    return Grant(granted, wanted - granted, max(0, held + granted - limit))


def give_back(db: sqlite3.Connection, writer: int, num_bytes: int) -> int:
    """Take up to ``num_bytes`` from what a writer holds; returns what it holds then."""
    left = max(0, read_grant(db, writer) - num_bytes)
    write_grant(db, writer, left)
    return left


def keep(db: sqlite3.Connection, writer: int, num_bytes: int, capacity_bytes: int) -> int:
    """Grant a writer bytes that it has just made free, as far as the capacity is not exceeded; returns them."""
    kept = max(0, min(num_bytes, capacity_bytes - read_totals(db).num_bytes))
    if kept:
        write_grant(db, writer, read_grant(db, writer) + kept)
    return kept
