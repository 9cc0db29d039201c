# SPDX-License-Identifier: Apache-2.0
"""What processes with an index of their own are told: all that is there, and then, numbered, what came and went.

Old changes are trimmed. Whoever has missed some loads everything again.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import rows
from vllm_overlay.tiers.disk.catalogue.connection import Connection
from vllm_overlay.tiers.disk.catalogue.errors import Damaged, FellBehind
from vllm_overlay.tiers.disk.catalogue.namespaces import find_namespace, fingerprint_of
from vllm_overlay.tiers.disk.catalogue.rows import COLUMNS, File, Id, StoredObject, read_all, read_objects

MAX_KEPT = 65_536
_READ_ROWS = 1024
_SLICE_ROWS = 4096
_WHERE = "change.seq > ? AND change.seq <= ? AND change.namespace = ?"


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
            first = int(rows.read_value(rows.Number, db.execute("SELECT coalesce(min(seq), 1) FROM change").fetchone()))
            if not first - 1 <= seq <= last:
                raise FellBehind(f"the catalogue keeps changes {first} to {last}, not all after {seq}")
            end = min(last, seq + _READ_ROWS)
            found: list[StoredObject | Gone] = []
            if end > seq and (namespace := find_namespace(db, fingerprint)) is not None:
                found += _read_changes(db, fingerprint, (seq, end, namespace))
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
    statement = "SELECT child, position, parent FROM parent WHERE child > ? AND child <= ? ORDER BY child, position"
    edges = read_all(tuple[Id, rows.Position, Id], db.execute(statement, (last, found[-1].id)))
    parents = _by_child([edge for edge in edges if edge[0] in names], names)  # others are of another namespace
    return [row.stored(fingerprints[row.namespace], names[row.id], parents.get(row.id, ())) for row in found]


def _read_changes(
    db: sqlite3.Connection, fingerprint: str, part: tuple[int, int, int]
) -> Iterator[StoredObject | Gone]:
    """Those of ``part``: the number before the first, that of the last, and the namespace. Few statements, because
    every engine reads every change."""

    def select(columns_and_tables: str, rest: str) -> list[Any]:
        return db.execute(f"SELECT {columns_and_tables} WHERE {_WHERE} {rest}", part).fetchall()

    columns = ", ".join(f"object.{column}" for column in COLUMNS.split(", "))
    added = select(f"{columns} FROM change CROSS JOIN object ON object.id = change.object", "AND is_added = 1")
    objects = {row.id: row for row in read_objects(added)}
    edges = select(
        "parent.child, parent.position, parent.parent, object.kind, object.key FROM change"
        " CROSS JOIN parent ON parent.child = change.object LEFT JOIN object ON object.id = parent.parent",
        "AND is_added = 1 ORDER BY change.seq, parent.position",
    )
    of_added = read_all(tuple[Id, rows.Position, Id, rows.Kind, rows.Key], edges)
    names = {parent: ObjectId(kind, key) for _, _, parent, kind, key in of_added}
    parents = _by_child([edge[:3] for edge in of_added], names)
    went = select("kind, key, writer, number FROM change", "AND is_added = 0 ORDER BY seq")
    gone = iter(read_all(tuple[rows.Kind, rows.Key, rows.WriterId, rows.Number], went))
    for is_added, number in read_all(tuple[rows.Flag, Id], select("is_added, object FROM change", "ORDER BY seq")):
        if not is_added:
            kind, key, writer, file = next(gone)
            yield Gone(ObjectId(kind, key), File(rows.name_of(writer), file))
        elif (row := objects.get(number)) is not None:  # else it has gone since: a later change says so
            yield row.stored(fingerprint, row.object_id, parents.get(number, ()))


def _by_child(edges: Iterable[tuple[int, int, int]], names: Mapping[int, ObjectId]) -> dict[int, tuple[ObjectId, ...]]:
    """The names of each object's parents. An edge has its number, a parent's position and number. Raises Damaged."""
    parents: dict[int, tuple[ObjectId, ...]] = {}
    for child, position, parent in edges:
        before = parents.get(child, ()) if position else ()  # an object whose file was replaced comes twice
        if position != len(before) or parent >= child or parent not in names:
            raise Damaged(f"object {child} has {parent} as a parent")
        parents[child] = (*before, names[parent])
    return parents


def trim(db: sqlite3.Connection) -> None:
    """Called at the end of each transaction that wrote changes."""
    db.execute("DELETE FROM change WHERE seq <= ?", (_last_seq(db) - MAX_KEPT,))


def _last_seq(db: sqlite3.Connection) -> int:
    """The number of the last change; 0 before the first."""
    return int(rows.read_value(rows.Number, db.execute("SELECT coalesce(max(seq), 0) FROM change").fetchone()))
