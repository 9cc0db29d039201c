# SPDX-License-Identifier: Apache-2.0
"""One object's row, and the names of its parents."""

import sqlite3
from collections.abc import Sequence

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue.errors import Damaged
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespaces
from vllm_overlay.tiers.disk.catalogue.rows import (
    COLUMNS,
    MAX_PARENTS,
    Id,
    Key,
    Name,
    ObjectRow,
    StoredObject,
    Tag,
    read_all,
)

BY_NAME = "namespace = ? AND key = ? AND tag = ?"


def find_id(db: sqlite3.Connection, namespace: int, object_id: ObjectId) -> int | None:
    """The number of an object; None when it is not there."""
    row = db.execute(f"SELECT id FROM object WHERE {BY_NAME}", (namespace, object_id.key, object_id.tag)).fetchone()
    return None if row is None else read_all(Id, row)[0]


def parents_of(db: sqlite3.Connection, number: int) -> list[int]:
    """The numbers of an object's parents, in order."""
    rows = db.execute(
        f"SELECT parent FROM parent WHERE child = ? ORDER BY position LIMIT {MAX_PARENTS + 1}", (number,)
    ).fetchall()
    parents = read_all(Id, (row[0] for row in rows))
    if len(parents) > MAX_PARENTS or any(parent >= number for parent in parents):
        raise Damaged(f"object {number} has {parents} as parents")
    return parents


def with_parents(db: sqlite3.Connection, namespaces: Namespaces, row: ObjectRow) -> StoredObject:
    """The object of a row, with the names of its parents. Raises Damaged where one is not there."""
    found = [_name_of(db, number) for number in parents_of(db, row.id)]
    return row.stored(namespaces.fingerprint_of(row.namespace), tuple(found))


def _name_of(db: sqlite3.Connection, number: int) -> ObjectId:
    rows = db.execute("SELECT tag, key FROM object WHERE id = ?", (number,)).fetchall()
    for tag, key in read_all(tuple[Tag, Key], rows):
        return ObjectId(tag, key)
    raise Damaged(f"parent {number} is not there")


def find(db: sqlite3.Connection, names: Sequence[Name]) -> list[StoredObject]:
    """Those of the named objects that are there."""
    namespaces = Namespaces(db)
    found = []
    for name in names:
        if (namespace := namespaces.get(name.fingerprint)) is not None:
            arguments = namespace.id, name.object_id.key, name.object_id.tag
            rows = db.execute(f"SELECT {COLUMNS} FROM object WHERE {BY_NAME}", arguments).fetchall()
            found += [with_parents(db, namespaces, row) for row in read_all(ObjectRow, rows)]
    return found
