# SPDX-License-Identifier: Apache-2.0
"""Files that no row of an object names any more and that are to be unlinked. Their bytes are free after that."""

import sqlite3
from collections.abc import Iterable, Sequence, Set

from vllm_overlay.tiers.disk.catalogue import rows
from vllm_overlay.tiers.disk.catalogue.connection import LONG_CALLS, Connection
from vllm_overlay.tiers.disk.catalogue.rows import BATCH_ROWS, File, Garbage, Number, batches, file_columns, number_of
from vllm_overlay.tiers.disk.catalogue.writers import is_complete, read_grant, read_totals, write_grant

_FIRST = (-(2**63), -1)
_OF_ANYTHING = "SELECT number FROM object WHERE writer = ?1 {0} UNION SELECT number FROM garbage WHERE writer = ?1 {0}"


class GarbageList(Connection):
    """See ``Catalogue``."""

    def numbers_of(self, writer: str) -> set[int] | None:
        """The numbers of its files that a row or the garbage names; None until a rebuild is complete."""
        number = number_of(writer)
        with self.reading(LONG_CALLS) as db:
            if not is_complete(db):
                return None
            found = db.execute(_OF_ANYTHING.format(""), (number,))
            return {number for (number,) in rows.read_all(tuple[Number], found)}

    def named(self, files: Iterable[File]) -> set[File]:
        """Those of these files that a row or the garbage names."""
        found: set[File] = set()
        statement = _OF_ANYTHING.format("AND number = ?2")
        for part in batches(files):
            with self.reading() as db:
                found.update(file for file in part if db.execute(statement, file_columns(file)).fetchone())
        return found

    def garbage(self, writer: str, most: int = BATCH_ROWS, after: File | None = None) -> list[Garbage]:
        """What this writer has to unlink, and what nobody has claimed: it is this writer's then.

        At most ``most``, in an order in which ``after`` goes on. The caller unlinks it and calls ``collected`` then.
        """
        number = number_of(writer)
        start = _FIRST if after is None else file_columns(after)
        with self.writing() as db:
            read_grant(db, number)
            found = db.execute(
                "SELECT writer, number, world_size, num_bytes FROM garbage WHERE (collector IS NULL OR collector = ?)"
                " AND (writer, number) > (?, ?) ORDER BY writer, number LIMIT ?",
                (number, *start, min(most, BATCH_ROWS)),
            )
            claimed = rows.read_all(tuple[rows.WriterId, Number, rows.WorldSize, rows.ObjectBytes], found)
            db.executemany(
                "UPDATE garbage SET collector = ? WHERE collector IS NULL AND writer = ? AND number = ?",
                ((number, *row[:2]) for row in claimed),
            )
            return [Garbage(File(rows.name_of(of), each), ranks, size) for of, each, ranks, size in claimed]

    def collected(self, writer: str, files: Iterable[File], keep_bytes: int = 0, capacity_bytes: int = 0) -> int:
        """These files are gone. Up to ``keep_bytes`` of what that frees, which is nothing for what somebody has freed
        before, become this writer's room, as far as the capacity is kept; returns them."""
        number = number_of(writer)
        rows.check_value(rows.NumBytes, keep_bytes, capacity_bytes)
        kept = 0
        for part in batches(files):
            with self.writing() as db:
                room = min(_collect(db, part), keep_bytes - kept, capacity_bytes - read_totals(db).num_bytes)
                if room > 0:
                    write_grant(db, number, read_grant(db, number) + room)
                    kept += room
        return kept


def _collect(db: sqlite3.Connection, files: Sequence[File]) -> int:
    freed = 0
    for columns in map(file_columns, files):
        row = db.execute("SELECT num_bytes FROM garbage WHERE writer = ? AND number = ?", columns).fetchone()
        if row is not None:
            freed += int(rows.read_value(rows.ObjectBytes, row))
            db.execute("DELETE FROM garbage WHERE writer = ? AND number = ?", columns)
    return freed


def among(db: sqlite3.Connection, files: Sequence[File]) -> Set[File]:
    """Those of a transaction's files that are garbage, in a statement a writer."""
    found: set[File] = set()
    for writer in {file.writer for file in files}:
        of_one = [file.number for file in files if file.writer == writer]
        numbers = db.execute(
            "SELECT number FROM garbage WHERE writer = ? AND number BETWEEN ? AND ?",
            (number_of(writer), min(of_one), max(of_one)),
        )
        found.update(File(writer, number) for (number,) in rows.read_all(tuple[Number], numbers))
    return found


def discard(db: sqlite3.Connection, files: Sequence[Garbage]) -> None:
    """Files that no row names are garbage, whose nobody has claimed yet."""
    for item in files:
        db.execute(
            "INSERT OR IGNORE INTO garbage SELECT ?1, ?2, ?3, ?4, NULL"
            " WHERE NOT EXISTS (SELECT 1 FROM object WHERE writer = ?1 AND number = ?2)",
            (*file_columns(item.file), item.world_size, item.num_bytes),
        )
