# SPDX-License-Identifier: Apache-2.0
"""Objects come in."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager

import msgspec

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import feed, garbage, rows
from vllm_overlay.tiers.disk.catalogue.connection import Connection
from vllm_overlay.tiers.disk.catalogue.errors import Damaged
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespace, add_namespace, check_namespace, find_namespace
from vllm_overlay.tiers.disk.catalogue.rows import File, Garbage, StoredObject, batches, check_objects, number_of
from vllm_overlay.tiers.disk.catalogue.writers import act_as, is_complete, read_grant, write_grant

BY_NAME = "namespace = ? AND key = ? AND kind = ?"
_FIELDS = "writer, number, world_size, num_bytes, payload_bytes, start_tokens, end_tokens, last_use"
_FIND = f"SELECT id, writer, number FROM object WHERE {BY_NAME}"
_INSERT = (
    f"INSERT INTO object (namespace, kind, key, {_FIELDS}, num_children) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)"
    " ON CONFLICT (namespace, key, kind) DO NOTHING"
)
_REPLACE = f"UPDATE object SET ({_FIELDS}) = (?, ?, ?, ?, ?, ?, ?, ?) WHERE id = ?"


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The file that counts, and whether the writer's grant has paid for it: only then it is the one that came now."""

    file: File
    is_paid: bool


class Objects(Connection):
    """See ``Catalogue``."""

    def commit(self, writer: str, batch: Iterable[tuple[StoredObject, File | None]]) -> list[Committed | None]:
        """Take in objects, parents first, whose files are in place; their bytes come from this writer's grant.

        The second of a pair is the file that this one replaces: it becomes this writer's garbage. First commit wins: if
        a row of another file is there, the answer names that. An answer each, in order. None: it was not taken in, and
        its bytes stay granted. Nobody serves its namespace, a parent is not there, the writer was not granted as many
        bytes, or the file is to be unlinked, because a rebuild has preferred another one, which has gone since.
        """
        number = number_of(writer)
        answers: list[Committed | None] = []
        for part in batches(batch):
            items = [item for item, _ in part]
            check_objects(items)
            if others := {item.file.writer for item in items} - {writer}:
                raise ValueError(f"writer {writer} cannot commit a file of {others.pop()}")
            with self.writing() as db:
                act_as(db, number)
                arrivals = _Arrivals(db, read_grant(db, number), items)
                answers += [arrivals.add(item, replaced) for item, replaced in part]
                write_grant(db, number, arrivals.room_bytes)
                feed.trim(db)
        return answers

    # Rebuild, by one process at a time.

    def adopt(self, batch: Iterable[StoredObject], served: Iterable[Namespace] = ()) -> None:
        """Take in objects whose files a rebuild has found; they need no grant. Parents first.

        A file whose object has another file by now, or lacks a parent, is garbage.
        """
        with self._rebuilding() as db:
            for namespace in served:
                check_namespace(namespace)
                add_namespace(db, namespace)
        for part in batches(batch):
            check_objects(part)
            with self._rebuilding() as db:
                act_as(db, None)
                for fingerprint in sorted({item.fingerprint for item in part}):
                    add_namespace(db, Namespace(fingerprint))
                arrivals = _Arrivals(db, sum(item.num_bytes for item in part), part)
                for item in part:
                    arrivals.add(item, None)
                    garbage.discard(db, [Garbage(item.file, item.world_size, item.num_bytes)])
                feed.trim(db)

    def discard(self, files: Iterable[Garbage]) -> None:
        """Files that a rebuild has found and that no row names are garbage."""
        for part in batches(files):
            rows.check_value(rows.WorldSize, *(item.world_size for item in part))
            rows.check_value(rows.ObjectBytes, *(item.num_bytes for item in part))
            with self._rebuilding() as db:
                garbage.discard(db, part)

    @contextmanager
    def _rebuilding(self) -> Iterator[sqlite3.Connection]:
        with self.writing() as db:
            if is_complete(db):
                raise ValueError("the rebuild has ended")
            yield db


class _Arrivals:
    """One transaction's. The rows that it has found or made need not be looked up again as parents."""

    def __init__(self, db: sqlite3.Connection, room_bytes: int, items: Sequence[StoredObject]) -> None:
        self._db = db
        self.room_bytes = room_bytes
        self._unwanted: Set[File] = garbage.among(db, [item.file for item in items])
        """Files that are garbage: asked once, because a look at each row costs a tenth more."""
        self._ids: dict[tuple[int, ObjectId], int] = {}
        self._namespaces: dict[str, int | None] = {}

    def add(self, item: StoredObject, replaced: File | None) -> Committed | None:
        """Take one object in, or say who was first."""
        if item.fingerprint not in self._namespaces:
            self._namespaces[item.fingerprint] = find_namespace(self._db, item.fingerprint)
        if (namespace := self._namespaces[item.fingerprint]) is None:
            return None
        parents = [self._find_id(namespace, each) for each in item.planned.parents]
        may_come = item.num_bytes <= self.room_bytes and item.file not in self._unwanted
        if may_come and None not in parents and self._insert(namespace, item, parents):
            return self._paid(item)
        found = self._find_file(namespace, item.object_id)
        if found is not None and (found[1] == item.file or found[1] != replaced):
            return Committed(found[1], is_paid=False)
        if not may_come or (found is None and None in parents):
            return None
        if found is None:
            raise Damaged(f"{item.object_id} is there and is not found")
        self._db.execute(_REPLACE, (*rows.fields_of(item), found[0]))
        return self._paid(item)

    def _paid(self, item: StoredObject) -> Committed:
        self.room_bytes -= item.num_bytes
        return Committed(item.file, is_paid=True)

    def _insert(self, namespace: int, item: StoredObject, parents: Sequence[int | None]) -> bool:
        """False, and nothing changed, when a row of this name is there."""
        object_id = item.object_id
        cursor = self._db.execute(_INSERT, (namespace, object_id.tag, object_id.key, *rows.fields_of(item)))
        if not cursor.rowcount:
            return False
        self._ids[namespace, object_id] = number = cursor.lastrowid or 0
        for place, parent in enumerate(parents):
            self._db.execute("INSERT INTO parent VALUES (?, ?, ?)", (number, place, parent))
        return True

    def _find_file(self, namespace: int, object_id: ObjectId) -> tuple[int, File] | None:
        """The number of an object's row and its file; None when it is not there."""
        row = self._db.execute(_FIND, (namespace, object_id.key, object_id.tag)).fetchone()
        if row is None:
            return None
        number, writer, file = rows.read_one(tuple[rows.Id, rows.WriterId, rows.Number], row)
        self._ids[namespace, object_id] = number
        return number, File(rows.name_of(writer), file)

    def _find_id(self, namespace: int, object_id: ObjectId) -> int | None:
        if (namespace, object_id) not in self._ids and self._find_file(namespace, object_id) is None:
            return None
        return self._ids[namespace, object_id]
