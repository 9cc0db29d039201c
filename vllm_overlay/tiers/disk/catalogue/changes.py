# SPDX-License-Identifier: Apache-2.0
"""What came and went, numbered, for processes that keep an index of their own. Old changes are trimmed."""

import sqlite3
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue.errors import Damaged, FellBehind
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespaces
from vllm_overlay.tiers.disk.catalogue.rows import (
    COLUMNS,
    MAX_ID,
    Flag,
    Id,
    Key,
    Name,
    ObjectRow,
    Position,
    StoredObject,
    Tag,
    read_all,
    read_value,
)

MAX_KEPT = 65_536
_READ_ROWS = 1024
_Sequence = Annotated[int, Meta(ge=0, le=MAX_ID)]


@dataclass(frozen=True, slots=True)
class Changes:
    """In order: an object that came, or the name of one that went. ``seq`` is where to go on; ``has_more`` when to."""

    changes: list[StoredObject | Name]
    seq: int
    has_more: bool


def log(db: sqlite3.Connection, namespace: int, is_added: bool, number: int, object_id: ObjectId) -> None:
    """Write one change. Readers find the object's fields by its number, or a later removal."""
    db.execute(
        "INSERT INTO change (namespace, is_added, object, tag, key) VALUES (?, ?, ?, ?, ?)",
        (namespace, is_added, number, object_id.tag, object_id.key),
    )


def trim(db: sqlite3.Connection) -> None:
    """Called at the end of each transaction that wrote changes."""
    db.execute("DELETE FROM change WHERE seq <= ?", (last_seq(db) - MAX_KEPT,))


def last_seq(db: sqlite3.Connection) -> int:
    """The number of the last change; 0 before the first."""
    row = db.execute("SELECT coalesce(max(seq), 0) FROM change").fetchone()
    return int(read_value(_Sequence, row))


def read(db: sqlite3.Connection, seq: int, fingerprints: Iterable[str]) -> Changes:
    """What changed after ``seq`` in these namespaces and their partners, whoever did it. Raises FellBehind."""
    first, last = _bounds(db)
    if not first - 1 <= seq <= last:
        raise FellBehind(f"the catalogue keeps changes {first} to {last}, not all after {seq}")
    end = min(last, seq + _READ_ROWS)
    namespaces = Namespaces(db)
    wanted = {number: namespaces.fingerprint_of(number) for number in namespaces.ids_with_partners(fingerprints)}
    part = _Part(db, seq, end, wanted)
    rows, parents = part.read_objects(), part.read_parents()
    found: list[StoredObject | Name] = []
    for namespace, is_added, number, tag, key in part.read_changes():
        if not is_added:
            found.append(Name(wanted[namespace], ObjectId(tag, key)))
        elif (row := rows.get(number)) is not None:  # else it has gone since, and a later change says so
            found.append(row.stored(wanted[namespace], tuple(parents.get(number, ()))))
    return Changes(found, end, end < last)


def _bounds(db: sqlite3.Connection) -> tuple[int, int]:
    """The first and the last number that are kept; 1 and 0 before the first change."""
    last = last_seq(db)
    row = db.execute("SELECT coalesce(min(seq), 1) FROM change").fetchone()
    return int(read_value(_Sequence, row)), last


class _Part:
    """Some changes in a row, as one transaction sees them. Few statements, because every member reads every change."""

    def __init__(self, db: sqlite3.Connection, seq: int, end: int, wanted: Collection[int]) -> None:
        self._db = db
        marks = ", ".join("?" * len(wanted))
        self._where = f"change.seq > ? AND change.seq <= ? AND change.namespace IN ({marks})"
        self._arguments = (seq, end, *sorted(wanted))

    def read_changes(self) -> list[tuple[int, int, int, str, bytes]]:
        """Namespace, whether it was added, number, and name."""
        rows = self._select("namespace, is_added, object, tag, key FROM change", "ORDER BY seq")
        return read_all(tuple[Id, Flag, Id, Tag, Key], rows)

    def read_objects(self) -> dict[int, ObjectRow]:
        """What was added and is still there, by number."""
        columns = ", ".join(f"object.{column}" for column in COLUMNS.split(", "))
        rows = self._select(f"{columns} FROM change CROSS JOIN object ON object.id = change.object", "AND is_added = 1")
        return {row.id: row for row in read_all(ObjectRow, rows)}

    def read_parents(self) -> dict[int, list[ObjectId]]:
        """The names of the parents of what was added, by its number. Raises Damaged."""
        rows = self._select(
            "parent.child, parent.position, parent.parent, object.tag, object.key FROM change"
            " CROSS JOIN parent ON parent.child = change.object LEFT JOIN object ON object.id = parent.parent",
            "AND is_added = 1 ORDER BY change.seq, parent.position",
        )
        found: dict[int, list[ObjectId]] = {}
        for child, position, parent, tag, key in read_all(tuple[Id, Position, Id, Tag, Key], rows):
            of_one = found.setdefault(child, [])
            if position == 0:  # an object that was stored twice comes twice
                of_one.clear()
            if position != len(of_one) or parent >= child:
                raise Damaged(f"object {child} has {parent} as a parent")
            of_one.append(ObjectId(tag, key))
        return found

    def _select(self, columns_and_tables: str, rest: str) -> list[Any]:
        return self._db.execute(f"SELECT {columns_and_tables} WHERE {self._where} {rest}", self._arguments).fetchall()
