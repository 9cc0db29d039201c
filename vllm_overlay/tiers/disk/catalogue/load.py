# SPDX-License-Identifier: Apache-2.0
"""Reads whole namespaces in the order in which an index takes them."""

import sqlite3
from collections.abc import Iterable
from typing import Any

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue.errors import Damaged
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespaces
from vllm_overlay.tiers.disk.catalogue.rows import COLUMNS, MAX_PARENTS, Id, ObjectRow, StoredObject, read_all

SLICE_ROWS = 4096


class Loader:
    """Reads all objects of some namespaces, parents before children, a slice in a transaction.

    An object's number is higher than its parents', and no number comes twice. So the order holds though others write
    between two slices.
    """

    def __init__(self, fingerprints: Iterable[str]) -> None:
        self._fingerprints = tuple(fingerprints)
        self._last = 0
        self._names: dict[int, ObjectId] = {}
        self.is_done = False

    def read(self, db: sqlite3.Connection) -> list[StoredObject]:
        """The next objects; none at the end."""
        namespaces = Namespaces(db)
        numbers = sorted(namespaces.ids_with_partners(self._fingerprints))
        rows = read_all(ObjectRow, self._select(db, numbers))
        self.is_done = len(rows) < SLICE_ROWS
        if not rows:
            return []
        first, self._last = self._last, rows[-1].id
        self._names.update((row.id, row.object_id) for row in rows)
        parents = self._read_parents(db, first, {row.id for row in rows})
        fingerprints = {number: namespaces.fingerprint_of(number) for number in numbers}
        return [row.stored(fingerprints[row.namespace], tuple(parents.get(row.id, ()))) for row in rows]

    def _select(self, db: sqlite3.Connection, numbers: list[int]) -> list[Any]:
        marks = ", ".join("?" * len(numbers))
        return db.execute(
            f"SELECT {COLUMNS} FROM object NOT INDEXED WHERE id > ? AND namespace IN ({marks}) ORDER BY id LIMIT ?",
            (self._last, *numbers, SLICE_ROWS),
        ).fetchall()

    def _read_parents(self, db: sqlite3.Connection, first: int, wanted: set[int]) -> dict[int, list[ObjectId]]:
        rows = db.execute(
            "SELECT child, parent FROM parent WHERE child > ? AND child <= ? ORDER BY child, position",
            (first, self._last),
        )
        parents: dict[int, list[ObjectId]] = {}
        for child, parent in read_all(tuple[Id, Id], rows):
            if child in wanted:
                if parent >= child or parent not in self._names:
                    raise Damaged(f"object {child} has {parent} as a parent")
                parents.setdefault(child, []).append(self._names[parent])
        if any(len(of_one) > MAX_PARENTS for of_one in parents.values()):
            raise Damaged("an object has too many parents")
        return parents
