# SPDX-License-Identifier: Apache-2.0
"""Files that no row of an object names any more and that are to be unlinked. Their bytes are free after that."""

import sqlite3
from collections.abc import Sequence, Set

from vllm_overlay.tiers.disk.catalogue.rows import (
    File,
    Garbage,
    Number,
    ObjectBytes,
    WorldSize,
    WriterId,
    file_columns,
    name_of,
    number_of,
    read_all,
    read_value,
)

_OF_ANYTHING = "SELECT number FROM object WHERE writer = ?1 {0} UNION SELECT number FROM garbage WHERE writer = ?1 {0}"


def numbers_of(db: sqlite3.Connection, writer: int) -> set[int]:
    """The numbers of a writer's files that a row or the garbage names."""
    rows = db.execute(_OF_ANYTHING.format(""), (writer,))
    return {number for (number,) in read_all(tuple[Number], rows)}


def named(db: sqlite3.Connection, files: Sequence[File]) -> Set[File]:
    """Those that a row or the garbage names."""
    statement = _OF_ANYTHING.format("AND number = ?2")
    return {file for file in files if db.execute(statement, file_columns(file)).fetchone()}


def among(db: sqlite3.Connection, files: Sequence[File]) -> Set[File]:
    """Those of a transaction's files that are garbage, in a statement a writer."""
    found: set[File] = set()
    for writer in {file.writer for file in files}:
        of_one = [file.number for file in files if file.writer == writer]
        rows = db.execute(
            "SELECT number FROM garbage WHERE writer = ? AND number BETWEEN ? AND ?",
            (number_of(writer), min(of_one), max(of_one)),
        )
        found.update(File(writer, number) for (number,) in read_all(tuple[Number], rows))
    return found


def discard(db: sqlite3.Connection, files: Sequence[Garbage]) -> None:
    """Files that no row names are garbage, whose nobody has claimed yet."""
    for item in files:
        db.execute(
            "INSERT OR IGNORE INTO garbage SELECT ?1, ?2, ?3, ?4, NULL"
            " WHERE NOT EXISTS (SELECT 1 FROM object WHERE writer = ?1 AND number = ?2)",
            (*file_columns(item.file), item.world_size, item.num_bytes),
        )


def claim(db: sqlite3.Connection, writer: int, most: int, after: tuple[int, int]) -> list[Garbage]:
    """What a writer has to unlink, and what nobody had claimed: it is this writer's now."""
    rows = read_all(
        tuple[WriterId, Number, WorldSize, ObjectBytes],
        db.execute(
            "SELECT writer, number, world_size, num_bytes FROM garbage WHERE (collector IS NULL OR collector = ?)"
            " AND (writer, number) > (?, ?) ORDER BY writer, number LIMIT ?",
            (writer, *after, most),
        ),
    )
    db.executemany(
        "UPDATE garbage SET collector = ? WHERE collector IS NULL AND writer = ? AND number = ?",
        ((writer, *row[:2]) for row in rows),
    )
    return [Garbage(File(name_of(of), number), world_size, size) for of, number, world_size, size in rows]


def collected(db: sqlite3.Connection, files: Sequence[File]) -> int:
    """These are unlinked; returns the bytes that this frees: none for what somebody has freed before."""
    freed = 0
    for file in files:
        columns = file_columns(file)
        row = db.execute("SELECT num_bytes FROM garbage WHERE writer = ? AND number = ?", columns).fetchone()
        if row is not None:
            freed += int(read_value(ObjectBytes, row))
            db.execute("DELETE FROM garbage WHERE writer = ? AND number = ?", columns)
    return freed
