# SPDX-License-Identifier: Apache-2.0
"""What came and went, numbered, for processes that keep an index of their own. Old changes are trimmed."""

import sqlite3
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue.errors import Damaged, FellBehind
from vllm_overlay.tiers.disk.catalogue.rows import (
    COLUMNS,
    MAX_ID,
    File,
    Flag,
    Id,
    Key,
    Kind,
    Number,
    ObjectRow,
    Position,
    StoredObject,
    WriterId,
    name_of,
    read_all,
    read_objects,
    read_value,
)
from vllm_overlay.tiers.disk.catalogue.writers import find_namespace

MAX_KEPT = 65_536
_READ_ROWS = 1024
_WHERE = "change.seq > ? AND change.seq <= ? AND change.namespace = ?"
_Sequence = Annotated[int, Meta(ge=0, le=MAX_ID)]


class Gone(msgspec.Struct, frozen=True, gc=False):
    """An object that went, with the file that it had."""

    object_id: ObjectId
    file: File


@dataclass(frozen=True, slots=True)
class Changes:
    """In order: an object that came or has another file, or one that went. ``seq`` is where to go on; ``has_more`` when
    to."""

    changes: list[StoredObject | Gone]
    seq: int
    has_more: bool


def trim(db: sqlite3.Connection) -> None:
    """Called at the end of each transaction that wrote changes."""
    db.execute("DELETE FROM change WHERE seq <= ?", (last_seq(db) - MAX_KEPT,))


def last_seq(db: sqlite3.Connection) -> int:
    """The number of the last change; 0 before the first."""
    row = db.execute("SELECT coalesce(max(seq), 0) FROM change").fetchone()
    return int(read_value(_Sequence, row))


def read(db: sqlite3.Connection, seq: int, fingerprint: str) -> Changes:
    """What changed after ``seq`` in this namespace, whoever did it. Raises FellBehind."""
    last = last_seq(db)
    first = int(read_value(_Sequence, db.execute("SELECT coalesce(min(seq), 1) FROM change").fetchone()))
    if not first - 1 <= seq <= last:
        raise FellBehind(f"the catalogue keeps changes {first} to {last}, not all after {seq}")
    end = min(last, seq + _READ_ROWS)
    found: list[StoredObject | Gone] = []
    if end > seq and (namespace := find_namespace(db, fingerprint)) is not None:
        part = _Part(db, seq, end, namespace)
        rows, parents, gone = part.read_objects(), part.read_parents(), part.read_gone()
        for is_added, number in part.read_changes():
            if not is_added:
                found.append(gone[number])
            elif (row := rows.get(number)) is not None:  # else it has gone since, and a later change says so
                found.append(row.stored(fingerprint, row.object_id, tuple(parents.get(number, ()))))
    return Changes(found, end, end < last)


class _Part:
    """Some changes in a row, as one transaction sees them. Few statements, because every engine reads every change."""

    def __init__(self, db: sqlite3.Connection, seq: int, end: int, namespace: int) -> None:
        self._db = db
        self._arguments = (seq, end, namespace)

    def read_changes(self) -> list[tuple[int, int]]:
        """Whether it was added, and the number of its row."""
        return read_all(tuple[Flag, Id], self._select("is_added, object FROM change", "ORDER BY seq"))

    def read_gone(self) -> dict[int, Gone]:
        """What went, by the number of its row, which no other object has after it."""
        rows = self._select("object, kind, key, writer, number FROM change", "AND is_added = 0")
        return {
            number: Gone(ObjectId(kind, key), File(name_of(writer), file))
            for number, kind, key, writer, file in read_all(tuple[Id, Kind, Key, WriterId, Number], rows)
        }

    def read_objects(self) -> dict[int, ObjectRow]:
        """What was added and is still there, by number."""
        columns = ", ".join(f"object.{column}" for column in COLUMNS.split(", "))
        rows = self._select(f"{columns} FROM change CROSS JOIN object ON object.id = change.object", "AND is_added = 1")
        return {row.id: row for row in read_objects(rows)}

    def read_parents(self) -> dict[int, list[ObjectId]]:
        """The names of the parents of what was added, by its number. Raises Damaged."""
        rows = self._select(
            "parent.child, parent.position, parent.parent, object.kind, object.key FROM change"
            " CROSS JOIN parent ON parent.child = change.object LEFT JOIN object ON object.id = parent.parent",
            "AND is_added = 1 ORDER BY change.seq, parent.position",
        )
        found: dict[int, list[ObjectId]] = {}
        for child, position, parent, kind, key in read_all(tuple[Id, Position, Id, Kind, Key], rows):
            of_one = found.setdefault(child, [])
            if position == 0:  # an object whose file was replaced comes twice
                of_one.clear()
            if position != len(of_one) or parent >= child:
                raise Damaged(f"object {child} has {parent} as a parent")
            of_one.append(ObjectId(kind, key))
        return found

    def _select(self, columns_and_tables: str, rest: str) -> list[Any]:
        return self._db.execute(f"SELECT {columns_and_tables} WHERE {_WHERE} {rest}", self._arguments).fetchall()
