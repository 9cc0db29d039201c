# SPDX-License-Identifier: Apache-2.0
"""What processes with an index of their own are told: all that is there, and then, numbered, what came and went.

Old changes are trimmed. Whoever has missed some loads everything again.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import rows
from vllm_overlay.tiers.disk.catalogue.connection import Connection
from vllm_overlay.tiers.disk.catalogue.errors import Damaged, FellBehind
from vllm_overlay.tiers.disk.catalogue.namespaces import find_namespace, fingerprint_of
from vllm_overlay.tiers.disk.catalogue.rows import COLUMNS, File, Id, ObjectRow, StoredObject, read_all, read_objects

MAX_KEPT = 65_536
_READ_ROWS = 1024
_SLICE_ROWS = 4096
_WHERE = "change.seq > ? AND change.seq <= ? AND change.namespace = ?"
_Sequence = Annotated[int, Meta(ge=0, le=rows.MAX_ID)]


class Gone(msgspec.Struct, frozen=True, gc=False):
    """An object that went, by whatever process, and the file that went with it."""

    object_id: ObjectId
    file: File


@dataclass(frozen=True, slots=True)
class Changes:
    """In order: an object that came or has another file, or one that went. ``seq`` is where to go on; ``has_more`` when
    to."""

    changes: list[StoredObject | Gone]
    seq: int
    has_more: bool


class Feed(Connection):
    """See ``Catalogue``."""

    def load(self, fingerprint: str) -> tuple[int, Iterator[list[StoredObject]]]:
        """All objects of a namespace, parents first, in slices; and the number to give to ``changes_since`` after the
        last slice."""
        rows.check_value(rows.Fingerprint, fingerprint)
        with self.reading() as db:
            seq = _last_seq(db)
        return seq, self._slices(fingerprint)

    def load_all(self) -> Iterator[list[StoredObject]]:
        """The objects of every namespace, for tools."""
        return self._slices(None)

    def _slices(self, fingerprint: str | None) -> Iterator[list[StoredObject]]:
        """Each is read in a transaction of its own.

        An object's number is higher than its parents', and no number comes twice. So the order holds though others
        write between two slices.
        """
        names: dict[int, ObjectId] = {}
        while True:
            with self.reading() as db:
                found = _read_slice(db, fingerprint, names)
            if found:
                yield found
            if len(found) < _SLICE_ROWS:
                return

    def changes_since(self, seq: int, fingerprint: str) -> Changes:
        """What changed after ``seq``, at most a thousand, the caller's own changes in their places among others'.

        Raises FellBehind: then ``load`` again.
        """
        with self.reading() as db:
            last = _last_seq(db)
            first = int(rows.read_value(_Sequence, db.execute("SELECT coalesce(min(seq), 1) FROM change").fetchone()))
            if not first - 1 <= seq <= last:
                raise FellBehind(f"the catalogue keeps changes {first} to {last}, not all after {seq}")
            end = min(last, seq + _READ_ROWS)
            found: list[StoredObject | Gone] = []
            if end > seq and (namespace := find_namespace(db, fingerprint)) is not None:
                part = _Part(db, (seq, end, namespace))
                objects, parents, gone = part.read_objects(), part.read_parents(), part.read_gone()
                for is_added, number in part.read_changes():
                    if not is_added:
                        found.append(gone[number])
                    elif (row := objects.get(number)) is not None:  # else it has gone since: a later change says so
                        found.append(row.stored(fingerprint, row.object_id, tuple(parents.get(number, ()))))
            return Changes(found, end, end < last)


def _read_slice(db: sqlite3.Connection, fingerprint: str | None, names: dict[int, ObjectId]) -> list[StoredObject]:
    """The next objects of one namespace, or of all, after those in ``names``, which get theirs. None at the end."""
    where, arguments = "", [last := next(reversed(names), 0), _SLICE_ROWS]
    if fingerprint is not None:
        if (namespace := find_namespace(db, fingerprint)) is None:
            return []
        where = "AND namespace = ?3"
        arguments.append(namespace)
    statement = f"SELECT {COLUMNS} FROM object NOT INDEXED WHERE id > ?1 {where} ORDER BY id LIMIT ?2"
    if not (found := read_objects(db.execute(statement, arguments))):
        return []
    fingerprints = {each: fingerprint_of(db, each) for each in {row.namespace for row in found}}
    names.update((row.id, row.object_id) for row in found)
    parents = _read_parents(db, last, found[-1].id, names)
    return [row.stored(fingerprints[row.namespace], names[row.id], parents.get(row.id, ())) for row in found]


def _read_parents(
    db: sqlite3.Connection, after: int, last: int, names: dict[int, ObjectId]
) -> dict[int, tuple[ObjectId, ...]]:
    edges = db.execute(
        "SELECT child, parent FROM parent WHERE child > ? AND child <= ? ORDER BY child, position", (after, last)
    )
    parents: dict[int, tuple[ObjectId, ...]] = {}
    for child, parent in read_all(tuple[Id, Id], edges):
        if child in names:  # else it is of another namespace
            if parent >= child or parent not in names:
                raise Damaged(f"object {child} has {parent} as a parent")
            parents[child] = (*parents.get(child, ()), names[parent])
            if len(parents[child]) > rows.MAX_PARENTS:
                raise Damaged(f"object {child} has too many parents")
    return parents


class _Part:
    """Some changes in a row, as one transaction sees them. Few statements, because every engine reads every change."""

    def __init__(self, db: sqlite3.Connection, arguments: tuple[int, int, int]) -> None:
        """``arguments``: the number before the first change, that of the last, and the namespace."""
        self._db, self._arguments = db, arguments

    def read_changes(self) -> list[tuple[int, int]]:
        """Whether it was added, and the number of its row."""
        return read_all(tuple[rows.Flag, Id], self._select("is_added, object FROM change", "ORDER BY seq"))

    def read_gone(self) -> dict[int, Gone]:
        """What went, by the number of its row, which no other object has after it."""
        found = self._select("object, kind, key, writer, number FROM change", "AND is_added = 0")
        went = read_all(tuple[Id, rows.Kind, rows.Key, rows.WriterId, rows.Number], found)
        return {
            number: Gone(ObjectId(kind, key), File(rows.name_of(writer), file))
            for number, kind, key, writer, file in went
        }

    def read_objects(self) -> dict[int, ObjectRow]:
        """What was added and is still there, by number."""
        columns = ", ".join(f"object.{column}" for column in COLUMNS.split(", "))
        found = self._select(
            f"{columns} FROM change CROSS JOIN object ON object.id = change.object", "AND is_added = 1"
        )
        return {row.id: row for row in read_objects(found)}

    def read_parents(self) -> dict[int, list[ObjectId]]:
        """The names of the parents of what was added, by its number. Raises Damaged."""
        edges = self._select(
            "parent.child, parent.position, parent.parent, object.kind, object.key FROM change"
            " CROSS JOIN parent ON parent.child = change.object LEFT JOIN object ON object.id = parent.parent",
            "AND is_added = 1 ORDER BY change.seq, parent.position",
        )
        found: dict[int, list[ObjectId]] = {}
        for child, position, parent, kind, key in read_all(tuple[Id, rows.Position, Id, rows.Kind, rows.Key], edges):
            of_one = found.setdefault(child, [])
            if position == 0:  # an object whose file was replaced comes twice
                of_one.clear()
            if position != len(of_one) or parent >= child:
                raise Damaged(f"object {child} has {parent} as a parent")
            of_one.append(ObjectId(kind, key))
        return found

    def _select(self, columns_and_tables: str, rest: str) -> list[Any]:
        return self._db.execute(f"SELECT {columns_and_tables} WHERE {_WHERE} {rest}", self._arguments).fetchall()


def trim(db: sqlite3.Connection) -> None:
    """Called at the end of each transaction that wrote changes."""
    db.execute("DELETE FROM change WHERE seq <= ?", (_last_seq(db) - MAX_KEPT,))


def _last_seq(db: sqlite3.Connection) -> int:
    """The number of the last change; 0 before the first."""
    return int(rows.read_value(_Sequence, db.execute("SELECT coalesce(max(seq), 0) FROM change").fetchone()))
