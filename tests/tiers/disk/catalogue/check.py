# SPDX-License-Identifier: Apache-2.0
"""Whether a catalogue agrees with itself. The files it speaks of are not looked at."""

import itertools
import sqlite3
from collections import Counter
from collections.abc import Iterator

from tests.tiers.disk.catalogue.inside import reading
from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.catalogue.rows import (
    COLUMNS,
    MAX_PARENTS,
    Flag,
    Id,
    Number,
    NumBytes,
    ObjectRow,
    WriterId,
    read_all,
)
from vllm_overlay.tiers.disk.catalogue.writers import read_totals

MAX_FINDINGS = 100
_ROWS = 4096


def check(catalogue: Catalogue) -> list[str]:
    """Up to 100 sentences on what contradicts what; none when all is well. Reads every row. Raises CatalogueError."""
    with reading(catalogue) as db:
        return check_rows(db)


def check_rows(db: sqlite3.Connection) -> list[str]:
    findings = itertools.chain(_pages(db), _objects(db), _parents(db), _writers(db), _garbage(db), _changes(db))
    return list(itertools.islice(findings, MAX_FINDINGS))


def _pages(db: sqlite3.Connection) -> Iterator[str]:
    """Every index has what its table has, every column what its CHECK allows, and every page is in one place only."""
    for (sentence,) in db.execute(f"PRAGMA integrity_check({MAX_FINDINGS})").fetchall():
        if sentence != "ok":
            yield f"SQLite: {sentence}"


def _namespaces(db: sqlite3.Connection) -> set[int]:
    return {number for (number,) in read_all(tuple[Id], db.execute("SELECT id FROM namespace"))}


def _objects(db: sqlite3.Connection) -> Iterator[str]:
    namespaces = _namespaces(db)
    num_bytes = num_objects = newest = 0
    cursor = db.execute(f"SELECT {COLUMNS} FROM object NOT INDEXED")
    while chunk := cursor.fetchmany(_ROWS):
        for row in read_all(ObjectRow, chunk):
            num_bytes += row.num_bytes
            num_objects += 1
            newest = max(newest, row.last_use)
            if row.namespace not in namespaces:
                yield f"object {row.id} is in namespace {row.namespace}, which is not there"
    totals = read_totals(db)
    if (num_objects, num_bytes) != (totals.num_objects, totals.object_bytes):
        counted = f"{totals.num_objects} of {totals.object_bytes} counted"
        yield f"{num_objects} objects of {num_bytes} bytes are there, {counted}"
    if newest > totals.newest_use:
        yield f"an object was used at {newest}, after {totals.newest_use}"


def _parents(db: sqlite3.Connection) -> Iterator[str]:
    where = dict(read_all(tuple[Id, Id], db.execute("SELECT id, namespace FROM object")))
    children: Counter[int] = Counter()
    parents: Counter[int] = Counter()
    for child, position, parent in read_all(
        tuple[Id, NumBytes, Id], db.execute("SELECT child, position, parent FROM parent ORDER BY child, position")
    ):
        children[parent] += 1
        if position != parents[child] or position >= MAX_PARENTS:
            yield f"object {child} has a parent in position {position} after {parents[child]}"
        parents[child] += 1
        if child not in where or parent not in where:
            yield f"object {child} or its parent {parent} is not there"
        elif where[child] != where[parent]:
            yield f"parent {parent} of object {child} is in namespace {where[parent]}"
    for number, count in read_all(tuple[Id, NumBytes], db.execute("SELECT id, num_children FROM object")):
        if count != children[number]:
            yield f"object {number} has {children[number]} children and counts {count}"


def _writers(db: sqlite3.Connection) -> Iterator[str]:
    namespaces = _namespaces(db)
    for writer, namespace in read_all(
        tuple[WriterId, Id], db.execute("SELECT id, namespace FROM writer WHERE namespace IS NOT NULL")
    ):
        if namespace not in namespaces:
            yield f"writer {writer} serves namespace {namespace}, which is not there"


def _garbage(db: sqlite3.Connection) -> Iterator[str]:
    writers = {number for (number,) in read_all(tuple[WriterId], db.execute("SELECT id FROM writer"))}
    collectors = db.execute("SELECT DISTINCT collector FROM garbage WHERE collector IS NOT NULL")
    for (collector,) in read_all(tuple[WriterId], collectors):
        if collector not in writers:
            yield f"{collector} unlinks files and is no writer"
    both = db.execute("SELECT count(*) FROM garbage JOIN object USING (writer, number)").fetchone()[0]
    if both:
        yield f"{both} files are an object's and to be unlinked"


def _changes(db: sqlite3.Connection) -> Iterator[str]:
    """The last change of each object says what is there."""
    rows = db.execute(
        "SELECT change.object, is_added, change.writer, change.number, object.writer, object.number, max(seq)"
        " FROM change LEFT JOIN object ON object.id = change.object GROUP BY change.object"
    )
    for number, is_added, writer, file, writer_now, file_now, _ in read_all(
        tuple[Id, Flag, WriterId, Number, WriterId | None, Number | None, Id],
        rows,
    ):
        if (writer_now, file_now) != ((writer, file) if is_added else (None, None)):
            yield f"the last change of object {number} says something else"
