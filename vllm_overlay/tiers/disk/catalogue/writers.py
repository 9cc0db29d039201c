# SPDX-License-Identifier: Apache-2.0
"""Writers, and the bytes that they may still write.

A *writer* is one life of one engine; its row says which namespace it serves and what it was granted. Nobody asks for
locks here: who has seen that a writer is dead buries it.

Objects, grants and files that are being unlinked stay within the capacity together. A grant that nobody uses is room
that nobody has, so all writers together may hold a 32nd of the capacity, each its equal part of that, or the least that
it can work with.
"""

import sqlite3
from dataclasses import dataclass

import msgspec

from vllm_overlay.tiers.disk.catalogue import rows
from vllm_overlay.tiers.disk.catalogue.connection import Connection
from vllm_overlay.tiers.disk.catalogue.errors import Superseded
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespace, add_namespace, check_namespace, drop_unused
from vllm_overlay.tiers.disk.catalogue.rows import Flag, NumBytes, Seconds, check_value, name_of, number_of, read_value

HELD_PARTS = 32
_MAX_WRITERS = 100_000
_TOTALS = (
    "SELECT num_bytes, (SELECT coalesce(sum(granted), 0) FROM writer),"
    " (SELECT coalesce(sum(num_bytes), 0) FROM garbage), num_objects, (SELECT count(namespace) FROM writer),"
    " is_complete, newest_use FROM meta WHERE id = 1"
)


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


class Writers(Connection):
    """See ``Catalogue``."""

    def join(self, writer: str, namespace: Namespace) -> int:
        """This writer serves the namespace from now on. What it was granted stays its own, and is returned. Join before
        you ``load``."""
        number = number_of(writer)
        check_namespace(namespace)
        with self.writing() as db:
            serves = add_namespace(db, namespace)
            db.execute("INSERT OR IGNORE INTO writer VALUES (?, NULL, 0)", (number,))
            db.execute("UPDATE writer SET namespace = ? WHERE id = ?", (serves, number))
            drop_unused(db)
            return read_grant(db, number)

    def leave(self, writer: str, in_flight_bytes: int = 0) -> None:
        """It serves nothing any more, and what it has to unlink is anybody's. ``in_flight_bytes`` are of files that may
        still appear: others must bury it."""
        number = number_of(writer)
        check_value(NumBytes, in_flight_bytes)
        with self.writing() as db:
            db.execute("UPDATE garbage SET collector = NULL WHERE collector = ?", (number,))
            db.execute(
                "UPDATE writer SET namespace = NULL, granted = min(granted, ?) WHERE id = ?", (in_flight_bytes, number)
            )
            db.execute("DELETE FROM writer WHERE id = ? AND granted = 0", (number,))
            drop_unused(db)

    def bury(self, writer: str, heir: str) -> None:
        """End a writer that is dead and whose directory has no file that nothing names, as ``numbers_of`` has said.

        What it was granted is free. What it had to unlink is the heir's.
        """
        dead, heir_number = number_of(writer), number_of(heir)
        with self.writing() as db:
            read_grant(db, heir_number)
            db.execute("UPDATE garbage SET collector = ? WHERE collector = ?", (heir_number, dead))
            db.execute("DELETE FROM writer WHERE id = ?", (dead,))
            drop_unused(db)

    def writers(self) -> set[str]:
        """Who serves a namespace or was granted bytes. What has ended and left nothing but files has no row."""
        with self.reading() as db:
            found = db.execute("SELECT id FROM writer LIMIT ?", (_MAX_WRITERS,))
            return {name_of(number) for (number,) in rows.read_all(tuple[rows.WriterId], found)}

    def grant(self, writer: str, num_bytes: int, at_least: int, capacity_bytes: int) -> Grant:
        """Ask for room before files are written. ``at_least`` is what the next objects take in all ranks.

        Nothing is granted until a rebuild is complete.
        """
        number = number_of(writer)
        check_value(NumBytes, num_bytes, at_least, capacity_bytes)
        with self.writing() as db:
            totals, held = read_totals(db), read_grant(db, number)
            if not totals.is_complete:
                return Grant(0)
            limit = limit_bytes(totals, capacity_bytes, at_least)
            wanted = min(num_bytes, max(0, limit - held))
            granted = max(0, min(wanted, capacity_bytes - totals.num_bytes))
            if granted:
                write_grant(db, number, held + granted)
            return Grant(granted, wanted - granted, max(0, held + granted - limit))

    def give_back(self, writer: str, num_bytes: int) -> int:
        """Return room for which nothing will be written; returns what this writer still holds."""
        number = number_of(writer)
        check_value(NumBytes, num_bytes)
        with self.writing() as db:
            left = max(0, read_grant(db, number) - num_bytes)
            write_grant(db, number, left)
            return left

    def totals(self) -> Totals:
        """Counters, and sums over writers and garbage: as fast with a million objects as with none."""
        with self.reading() as db:
            return read_totals(db)

    def end_rebuild(self) -> None:
        """All files are known: room is granted from now on."""
        with self.writing() as db:
            db.execute("UPDATE meta SET is_complete = 1")


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


def read_totals(db: sqlite3.Connection) -> Totals:
    return rows.read_one(Totals, db.execute(_TOTALS).fetchone())


def is_complete(db: sqlite3.Connection) -> bool:
    """Whether the catalogue knows all files: no rebuild is under way."""
    return bool(read_value(Flag, db.execute("SELECT is_complete FROM meta WHERE id = 1").fetchone()))


def limit_bytes(totals: Totals, capacity_bytes: int, at_least: int) -> int:
    """What one writer may hold: its part, but always ``at_least``, which its next objects take."""
    return max(at_least, capacity_bytes // HELD_PARTS // max(1, totals.num_writers))
