# SPDX-License-Identifier: Apache-2.0
"""Reads whole namespaces in the order in which an index takes them."""

import sqlite3
from typing import Any

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue.errors import Damaged
from vllm_overlay.tiers.disk.catalogue.rows import COLUMNS, MAX_PARENTS, Id, StoredObject, read_all, read_objects
from vllm_overlay.tiers.disk.catalogue.writers import find_namespace, read_namespaces

SLICE_ROWS = 4096


class Loader:
    """Reads all objects of one namespace, or of all, parents before children, a slice in a transaction.

    An object's number is higher than its parents', and no number comes twice. So the order holds though others write
    between two slices.
    """

    def __init__(self, fingerprint: str | None) -> None:
        self._fingerprint = fingerprint
        self._last = 0
        self._names: dict[int, ObjectId] = {}
        self.is_done = False

    def read(self, db: sqlite3.Connection) -> list[StoredObject]:
        """The next objects; none at the end."""
        rows = read_objects(self._select(db))
        self.is_done = len(rows) < SLICE_ROWS
        if not rows:
            return []
        fingerprints = {number: row.fingerprint for number, row in read_namespaces(db).items()}
        first, self._last = self._last, rows[-1].id
        self._names.update((row.id, row.object_id) for row in rows)
        parents = self._read_parents(db, first)
        try:
            return [
                row.stored(fingerprints[row.namespace], self._names[row.id], parents.get(row.id, ())) for row in rows
            ]
        except KeyError as error:
            raise Damaged(f"there is no namespace {error}") from None

    def _select(self, db: sqlite3.Connection) -> list[Any]:
        arguments: tuple[int, ...] = (self._last, SLICE_ROWS)
        if self._fingerprint is None:
            where = ""
        elif (namespace := find_namespace(db, self._fingerprint)) is not None:
            where, arguments = "AND namespace = ?3", (*arguments, namespace)
        else:
            return []
        return db.execute(
            f"SELECT {COLUMNS} FROM object NOT INDEXED WHERE id > ?1 {where} ORDER BY id LIMIT ?2",
            arguments,
        ).fetchall()

    def _read_parents(self, db: sqlite3.Connection, first: int) -> dict[int, tuple[ObjectId, ...]]:
        rows = db.execute(
            "SELECT child, parent FROM parent WHERE child > ? AND child <= ? ORDER BY child, position",
            (first, self._last),
        )
        names = self._names
        parents: dict[int, tuple[ObjectId, ...]] = {}
        for child, parent in read_all(tuple[Id, Id], rows):
            if child in names:  # else it is of another namespace
                if parent >= child or parent not in names:
                    raise Damaged(f"object {child} has {parent} as a parent")
                parents[child] = (*parents.get(child, ()), names[parent])
                if len(parents[child]) > MAX_PARENTS:
                    raise Damaged(f"object {child} has too many parents")
        return parents
