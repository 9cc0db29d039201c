# SPDX-License-Identifier: Apache-2.0
"""Objects go: first their rows, so that nobody finds them, then their files, then the bytes are free.

Between the two, a row of ``removal`` has the bytes and keeps the name from being taken by a new file.
"""

import sqlite3
from collections.abc import Iterable, Sequence

import msgspec

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import changes, recency
from vllm_overlay.tiers.disk.catalogue.errors import Damaged
from vllm_overlay.tiers.disk.catalogue.lookup import BY_NAME
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespaces
from vllm_overlay.tiers.disk.catalogue.rows import (
    Id,
    Key,
    Name,
    NumBytes,
    ObjectBytes,
    RemovedObject,
    Score,
    Seconds,
    Tag,
    WorldSize,
    read_all,
    read_one,
    read_value,
)
from vllm_overlay.tiers.disk.catalogue.totals import add_objects


class _Going(msgspec.Struct, array_like=True, frozen=True):
    namespace: Id
    tag: Tag
    key: Key
    world_size: WorldSize
    num_bytes: ObjectBytes
    num_children: NumBytes
    score: Score | None
    score_expiry: Seconds | None


def begin(db: sqlite3.Connection, slot: int, numbers: Sequence[int]) -> list[RemovedObject]:
    """Take rows out, children before parents. Those that have children meanwhile, or are not there, stay."""
    namespaces = Namespaces(db)
    removed = []
    for number in numbers:
        row = db.execute(
            "SELECT namespace, tag, key, world_size, num_bytes, num_children, score, score_expiry FROM object"
            " WHERE id = ?",
            (number,),
        ).fetchone()
        if row is not None and not (going := read_one(_Going, row)).num_children:
            removed.append(_take_out(db, namespaces, slot, number, going))
    add_objects(db, -len(removed), -sum(item.num_bytes for item in removed))
    changes.trim(db)
    return removed


def _take_out(db: sqlite3.Connection, namespaces: Namespaces, slot: int, number: int, going: _Going) -> RemovedObject:
    object_id = ObjectId(going.tag, going.key)
    counted = db.execute(
        "UPDATE object SET num_children = num_children - 1 WHERE num_children > 0"
        " AND id IN (SELECT parent FROM parent WHERE child = ?)",
        (number,),
    )
    if going.score is not None:
        recency.pass_on(db, number, going.score, going.score_expiry)
    if db.execute("DELETE FROM parent WHERE child = ?", (number,)).rowcount != counted.rowcount:
        raise Damaged(f"a parent of object {number} knows of no child")
    db.execute("DELETE FROM object WHERE id = ?", (number,))
    db.execute(
        "INSERT INTO removal (namespace, key, tag, slot, world_size, num_bytes) VALUES (?, ?, ?, ?, ?, ?)",
        (going.namespace, going.key, going.tag, slot, going.world_size, going.num_bytes),
    )
    changes.log(db, going.namespace, False, number, object_id)
    name = Name(namespaces.fingerprint_of(going.namespace), object_id)
    return RemovedObject(name, going.world_size, going.num_bytes)


def end(db: sqlite3.Connection, slot: int, names: Iterable[Name]) -> int:
    """The files of these are unlinked; returns the bytes that this frees. Names that nobody removes count nothing."""
    namespaces = Namespaces(db)
    freed = 0
    for name in names:
        if (namespace := namespaces.get(name.fingerprint)) is None:
            continue
        arguments = namespace.id, name.object_id.key, name.object_id.tag, slot
        row = db.execute(f"SELECT num_bytes FROM removal WHERE {BY_NAME} AND slot = ?", arguments).fetchone()
        if row is not None:
            freed += read_value(ObjectBytes, row)
            db.execute(f"DELETE FROM removal WHERE {BY_NAME} AND slot = ?", arguments)
    return freed


def subtree(db: sqlite3.Connection, names: Iterable[Name]) -> list[int]:
    """The numbers of these objects and of everything on top of them, children before parents."""
    namespaces = Namespaces(db)
    found: set[int] = set()
    waiting: list[int] = []
    for name in names:
        if (namespace := namespaces.get(name.fingerprint)) is not None:
            arguments = namespace.id, name.object_id.key, name.object_id.tag
            waiting += read_all(Id, (row[0] for row in db.execute(f"SELECT id FROM object WHERE {BY_NAME}", arguments)))
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            rows = db.execute("SELECT child FROM parent WHERE parent = ?", (number,))
            waiting += read_all(Id, (row[0] for row in rows))
    return sorted(found, reverse=True)


def read_removals(db: sqlite3.Connection, namespaces: Namespaces, slot: int) -> list[RemovedObject]:
    """What a member wanted to unlink."""
    rows = db.execute("SELECT namespace, tag, key, world_size, num_bytes FROM removal WHERE slot = ?", (slot,))
    return [
        RemovedObject(Name(namespaces.fingerprint_of(namespace), ObjectId(tag, key)), world_size, num_bytes)
        for namespace, tag, key, world_size, num_bytes in read_all(tuple[Id, Tag, Key, WorldSize, ObjectBytes], rows)
    ]


def removal_bytes(db: sqlite3.Connection, slot: int) -> int:
    """Bytes of files that a member wants to unlink."""
    row = db.execute("SELECT coalesce(sum(num_bytes), 0) FROM removal WHERE slot = ?", (slot,)).fetchone()
    return int(read_value(NumBytes, row))
