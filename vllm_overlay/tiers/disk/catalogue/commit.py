# SPDX-License-Identifier: Apache-2.0
"""Objects come in."""

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import changes
from vllm_overlay.tiers.disk.catalogue.lookup import BY_NAME, find_id, parents_of
from vllm_overlay.tiers.disk.catalogue.members import read_grant, write_grant
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespaces
from vllm_overlay.tiers.disk.catalogue.rows import COLUMNS, ObjectRow, StoredObject, read_one
from vllm_overlay.tiers.disk.catalogue.totals import add_objects


class Refusal(StrEnum):
    """Why an object was not taken in. Its bytes stay granted."""

    NAMESPACE = "namespace"
    """Nobody has begun to serve it."""
    PARENT = "parent"
    """A parent is not there."""
    REMOVING = "removing"
    """Files of this name are about to be unlinked. Store it again later."""
    GONE = "gone"
    """A file of it is not there any more."""
    OTHER_PARENTS = "other_parents"
    """It is there and depends on other objects."""
    NO_GRANT = "no_grant"
    """The member was not granted as many bytes."""


@dataclass(slots=True)
class Commit:
    """What became of a batch. ``granted_bytes`` is what is left of the grant."""

    refused: list[tuple[StoredObject, Refusal]] = field(default_factory=list)
    granted_bytes: int = 0


class Writer:
    """Takes objects in, in one transaction."""

    def __init__(
        self,
        db: sqlite3.Connection,
        granted_bytes: int | None = None,
        is_there: Callable[[StoredObject], bool] | None = None,
    ) -> None:
        """``granted_bytes`` is None where files are told of that were there before: they need no grant.

        ``is_there``, where files may be gone, looks for them.
        """
        self._db = db
        self._is_there = is_there
        self._namespaces = Namespaces(db)
        self._ids: dict[tuple[int, ObjectId], int | None] = {}
        self._num_objects = self._num_bytes = 0
        self.granted_bytes = granted_bytes

    def add(self, item: StoredObject) -> Refusal | None:
        """Take one object in, or say why not."""
        if (namespace := self._namespaces.get(item.fingerprint)) is None:
            return Refusal.NAMESPACE
        parents = [self._find(namespace.parents_id, parent) for parent in item.planned.parents]
        found = [parent for parent in parents if parent is not None]
        if len(found) < len(parents):
            return Refusal.PARENT
        if self.granted_bytes is not None and self.granted_bytes < item.num_bytes:
            return Refusal.NO_GRANT
        name = namespace.id, item.planned.object_id.key, item.planned.object_id.tag
        if self._db.execute(f"SELECT 1 FROM removal WHERE {BY_NAME}", name).fetchone():
            return Refusal.REMOVING
        if self._is_there is not None and not self._is_there(item):
            return Refusal.GONE
        return self._insert(namespace.id, item, found)

    def finish(self) -> None:
        """Write the counters."""
        add_objects(self._db, self._num_objects, self._num_bytes)

    def _find(self, namespace: int, object_id: ObjectId) -> int | None:
        if (namespace, object_id) not in self._ids:
            self._ids[namespace, object_id] = find_id(self._db, namespace, object_id)
        return self._ids[namespace, object_id]

    def _insert(self, namespace: int, item: StoredObject, parents: list[int]) -> Refusal | None:
        object_id = item.planned.object_id
        before = self._find(namespace, object_id)
        if before is None:
            number = self._insert_row(namespace, item, parents)
            self._ids[namespace, object_id] = number
        elif parents_of(self._db, before) == parents:
            number = before
            self._replace_row(number, item)
        else:
            return Refusal.OTHER_PARENTS
        self._num_bytes += item.num_bytes
        if self.granted_bytes is not None:
            self.granted_bytes -= item.num_bytes
        changes.log(self._db, namespace, True, number, object_id)
        return None

    def _insert_row(self, namespace: int, item: StoredObject, parents: list[int]) -> int:
        object_id, planned = item.planned.object_id, item.planned
        cursor = self._db.execute(
            "INSERT INTO object (namespace, tag, key, world_size, num_bytes, payload_bytes, start_tokens, end_tokens,"
            " ticket, last_use, place, num_children) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
            (
                namespace, object_id.tag, object_id.key, item.world_size, item.num_bytes, planned.num_bytes,
                planned.start_tokens, planned.end_tokens, item.ticket, item.last_use, item.last_use,
            ),
        )  # fmt: skip
        number = cursor.lastrowid or 0
        for position, parent in enumerate(parents):
            self._db.execute("INSERT INTO parent VALUES (?, ?, ?)", (number, position, parent))
            self._db.execute("UPDATE object SET num_children = num_children + 1 WHERE id = ?", (parent,))
        self._num_objects += 1
        return number

    def _replace_row(self, number: int, item: StoredObject) -> None:
        """Another file took the object's name: the bytes of the one before are free."""
        planned = item.planned
        row = self._db.execute(f"SELECT {COLUMNS} FROM object WHERE id = ?", (number,)).fetchone()
        self._num_bytes -= read_one(ObjectRow, row).num_bytes
        self._db.execute(
            "UPDATE object SET world_size = ?, num_bytes = ?, payload_bytes = ?, start_tokens = ?, end_tokens = ?,"
            " ticket = ?, last_use = ?, place = CASE WHEN score IS NULL THEN ? ELSE score END WHERE id = ?",
            (
                item.world_size, item.num_bytes, planned.num_bytes, planned.start_tokens, planned.end_tokens,
                item.ticket, item.last_use, item.last_use, number,
            ),
        )  # fmt: skip


def from_grant(
    db: sqlite3.Connection,
    payer: int,
    batch: Sequence[StoredObject],
    result: Commit,
    is_there: Callable[[StoredObject], bool] | None,
) -> None:
    """Take in objects; their bytes come from the grant of ``payer``."""
    writer = Writer(db, read_grant(db, payer), is_there)
    _add_all(writer, batch, result)
    result.granted_bytes = writer.granted_bytes or 0
    write_grant(db, payer, result.granted_bytes)
    changes.trim(db)


def without_grant(db: sqlite3.Connection, batch: Sequence[StoredObject], result: Commit) -> None:
    """Take in objects whose files were there before the catalogue was."""
    _add_all(Writer(db), batch, result)
    changes.trim(db)


def _add_all(writer: Writer, batch: Sequence[StoredObject], result: Commit) -> None:
    for item in batch:
        if (refusal := writer.add(item)) is not None:
            result.refused.append((item, refusal))
    writer.finish()
