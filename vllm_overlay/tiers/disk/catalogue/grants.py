# SPDX-License-Identifier: Apache-2.0
"""Room: what all writers may still write.

Objects, grants and files that are being unlinked stay within the capacity together. A grant that nobody uses is room
that nobody has, so all writers together may hold a 32nd of the capacity, each its equal part of that.
"""

import sqlite3
from dataclasses import dataclass

import msgspec

from vllm_overlay.tiers.disk.catalogue.rows import Flag, NumBytes, Seconds, read_one, read_value
from vllm_overlay.tiers.disk.catalogue.writers import read_grant, write_grant

HELD_PARTS = 32


class MetaRow(msgspec.Struct, array_like=True, frozen=True):
    """The one row of ``meta``."""

    is_complete: Flag
    num_bytes: NumBytes
    num_objects: NumBytes
    newest_use: Seconds


@dataclass(frozen=True, slots=True)
class Totals:
    """In bytes. ``granted_bytes`` is for files that are no objects yet, ``removing_bytes`` are files to unlink.

    ``num_writers`` serve a namespace. ``is_complete`` is False until a rebuild has told the catalogue of all files.
    ``newest_use`` is the latest that anything was used at: time does not go back behind it.
    """

    object_bytes: int
    granted_bytes: int
    removing_bytes: int
    num_objects: int
    num_writers: int
    is_complete: bool
    newest_use: int

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


def read_meta(db: sqlite3.Connection) -> MetaRow:
    """The counters as they are in the file."""
    row = db.execute("SELECT is_complete, num_bytes, num_objects, newest_use FROM meta WHERE id = 1").fetchone()
    return read_one(MetaRow, row)


def read_totals(db: sqlite3.Connection) -> Totals:
    """Counters and sums over writers; takes no time that grows with the number of objects."""
    meta = read_meta(db)
    granted, writers = read_one(
        tuple[NumBytes, NumBytes],
        db.execute("SELECT coalesce(sum(granted), 0), count(namespace) FROM writer").fetchone(),
    )
    removing = read_value(NumBytes, db.execute("SELECT coalesce(sum(num_bytes), 0) FROM garbage").fetchone())
    return Totals(meta.num_bytes, granted, removing, meta.num_objects, writers, bool(meta.is_complete), meta.newest_use)


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
