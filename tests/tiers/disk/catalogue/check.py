# SPDX-License-Identifier: Apache-2.0
"""Whether a catalogue agrees with itself. The files it speaks of are not looked at."""

import itertools
import sqlite3
from collections import Counter
from collections.abc import Iterator

from tests.tiers.disk.inside import reading
from vllm_overlay.tiers.disk.catalogue import Catalogue
from vllm_overlay.tiers.disk.catalogue.members import read_members, served_by
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespaces
from vllm_overlay.tiers.disk.catalogue.rows import COLUMNS, MAX_PARENTS, Id, NumBytes, ObjectRow, Slot, read_all
from vllm_overlay.tiers.disk.catalogue.totals import read_totals

MAX_FINDINGS = 100
_ROWS = 4096


def check(catalogue: Catalogue) -> list[str]:
    """Up to 100 sentences on what contradicts what; none when all is well. Reads every row. Raises CatalogueError."""
    with reading(catalogue) as db:
        return _check(db)


def _check(db: sqlite3.Connection) -> list[str]:
    findings = itertools.chain(_pages(db), _objects(db), _parents(db), _members(db), _removals(db))
    return list(itertools.islice(findings, MAX_FINDINGS))


def _pages(db: sqlite3.Connection) -> Iterator[str]:
    """Every index has what its table has, and every page is in one place only."""
    for (sentence,) in db.execute(f"PRAGMA integrity_check({MAX_FINDINGS})").fetchall():
        if sentence != "ok":
            yield f"SQLite: {sentence}"


def _objects(db: sqlite3.Connection) -> Iterator[str]:
    namespaces = Namespaces(db)
    num_bytes = num_objects = 0
    cursor = db.execute(f"SELECT {COLUMNS} FROM object NOT INDEXED")
    while chunk := cursor.fetchmany(_ROWS):
        for row in read_all(ObjectRow, chunk):
            num_bytes += row.num_bytes
            num_objects += 1
            if row.namespace not in namespaces.by_id:
                yield f"object {row.id} is in namespace {row.namespace}, which is not there"
            if row.start_tokens > row.end_tokens:
                yield f"object {row.id} ends before it starts"
    totals = read_totals(db)
    if (num_objects, num_bytes) != (totals.num_objects, totals.object_bytes):
        counted = f"{totals.num_objects} of {totals.object_bytes} counted"
        yield f"{num_objects} objects of {num_bytes} bytes are there, {counted}"
    wrong = db.execute(
        "SELECT id FROM object WHERE place != coalesce(score, last_use) OR (score IS NULL) != (score_expiry IS NULL)"
        f" LIMIT {MAX_FINDINGS}"
    )
    for (number,) in wrong.fetchall():
        yield f"object {number} has another place than its score or last use says"


def _parents(db: sqlite3.Connection) -> Iterator[str]:
    namespaces = Namespaces(db)
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
        elif parent >= child:
            yield f"object {child} is older than its parent {parent}"
        elif (row := namespaces.by_id.get(where[child])) is not None and row.parents_id != where[parent]:
            yield f"parent {parent} of object {child} is in namespace {where[parent]}"
    for number, count in read_all(tuple[Id, NumBytes], db.execute("SELECT id, num_children FROM object")):
        if count != children[number]:
            yield f"object {number} has {children[number]} children and counts {count}"


def _members(db: sqlite3.Connection) -> Iterator[str]:
    namespaces = Namespaces(db)
    slots = {row.slot for row in read_members(db)}
    for slot, served in served_by(db).items():
        if slot not in slots:
            yield f"slot {slot} serves namespaces and is no member"
        for number in served - set(namespaces.by_id):
            yield f"slot {slot} serves namespace {number}, which is not there"


def _removals(db: sqlite3.Connection) -> Iterator[str]:
    slots = {row.slot for row in read_members(db)}
    for (slot,) in read_all(tuple[Slot], db.execute("SELECT DISTINCT slot FROM removal")):
        if slot not in slots:
            yield f"slot {slot} unlinks files and is no member"
    both = db.execute(
        "SELECT count(*) FROM removal JOIN object ON object.namespace = removal.namespace"
        " AND object.key = removal.key AND object.tag = removal.tag"
    ).fetchone()[0]
    if both:
        yield f"{both} objects are there and are being removed"
