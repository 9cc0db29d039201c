# SPDX-License-Identifier: Apache-2.0
"""The counters that every transaction keeps: bytes and number of objects, and what members hold beside them."""

import sqlite3
from dataclasses import dataclass

from vllm_overlay.tiers.disk.catalogue.errors import Damaged
from vllm_overlay.tiers.disk.catalogue.rows import MAX_BYTES, MetaRow, NumBytes, read_one, read_value


@dataclass(frozen=True, slots=True)
class Totals:
    """In bytes. ``granted`` is for files that are no objects yet, ``removing`` are files about to be unlinked.

    ``is_complete`` is False until a rebuild has told the catalogue of all files.
    """

    object_bytes: int
    granted_bytes: int
    removing_bytes: int
    num_objects: int
    num_members: int
    is_complete: bool

    @property
    def num_bytes(self) -> int:
        """What files may take at most."""
        return self.object_bytes + self.granted_bytes + self.removing_bytes


def read_meta(db: sqlite3.Connection) -> MetaRow:
    """The counters as they are in the file."""
    row = db.execute("SELECT is_complete, rebuilder, object_bytes, num_objects FROM meta WHERE id = 1").fetchone()
    return read_one(MetaRow, row)


def read_totals(db: sqlite3.Connection) -> Totals:
    """Counters and sums over members; takes no time that grows with the number of objects."""
    meta = read_meta(db)
    granted, members = read_one(
        tuple[NumBytes, NumBytes], db.execute("SELECT coalesce(sum(granted), 0), count(*) FROM member").fetchone()
    )
    removing = read_value(NumBytes, db.execute("SELECT coalesce(sum(num_bytes), 0) FROM removal").fetchone())
    return Totals(meta.object_bytes, granted, removing, meta.num_objects, members, bool(meta.is_complete))


def add_objects(db: sqlite3.Connection, num_objects: int, num_bytes: int) -> None:
    """Count objects that came, or went where the numbers are negative. Raises Damaged where that cannot be."""
    meta = read_meta(db)
    count, total = meta.num_objects + num_objects, meta.object_bytes + num_bytes
    if count < 0 or not 0 <= total <= MAX_BYTES:
        raise Damaged(f"{meta.num_objects} objects of {meta.object_bytes} bytes cannot become {count} of {total}")
    db.execute("UPDATE meta SET num_objects = ?, object_bytes = ? WHERE id = 1", (count, total))
