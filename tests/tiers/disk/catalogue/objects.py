# SPDX-License-Identifier: Apache-2.0
"""Objects and engines for the tests of the catalogue."""

import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.waiting import PATIENCE_S
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue import (
    Catalogue,
    Committed,
    File,
    Garbage,
    Grant,
    Limits,
    Namespace,
    StoredObject,
)

MODEL = Namespace("a" * 64, '{"model": "one"}')
OTHERS = Namespace("c" * 64)
PRIVATE = Namespace("d" * 64, is_private=True)
SNAPSHOT = "s" + "5" * 16
_SNAPSHOT_FILES = 1_000_000
MIB = 1 << 20
MANY = 1 << 40
NOW = 1_000


def writer_name(number: int) -> str:
    """Of the writers whose names matter; half of them begin with a digit from 8 up."""
    return hashlib.sha256(b"writer %d" % number).hexdigest()[:16]


NOBODY = writer_name(0)
"""Has joined nothing."""


def object_id(number: int, kind: str = "f0") -> ObjectId:
    return ObjectId(kind, hashlib.sha256(b"%d" % number).digest())


def stored(
    number: int,
    parents: tuple[int, ...] = (),
    namespace: Namespace = MODEL,
    num_bytes: int = 8192,
    last_use: int = NOW,
    kind: str = "f0",
    file: int | None = None,
    writer: str = NOBODY,
) -> StoredObject:
    """An object of one rank, a chunk unless ``kind`` says otherwise; its parents are chunks. Its file has the object's
    number unless ``file`` does."""
    planned = PlannedObject(object_id(number, kind), tuple(map(object_id, parents)), 64, 128, max(1, num_bytes - 4096))
    usual = number + (_SNAPSHOT_FILES if kind == SNAPSHOT else 0)
    where = File(writer, usual if file is None else file)
    return StoredObject(namespace.fingerprint, planned, where, 1, num_bytes, last_use)


def numbers(found: Iterable[StoredObject | Garbage]) -> list[int]:
    """Of the files; what ``stored`` was called with."""
    return [item.file.number for item in found]


def files(found: Iterable[StoredObject | Garbage]) -> list[File]:
    return [item.file for item in found]


class Engine:
    """A writer of a catalogue, which is complete from now on unless ``is_complete`` is False."""

    def __init__(
        self,
        root: Path,
        namespace: Namespace = MODEL,
        name: str = "",
        timeout_s: float = PATIENCE_S,
        journal: str = "wal",
        is_complete: bool = True,
    ) -> None:
        root.mkdir(mode=0o700, exist_ok=True)
        self.name = name or secrets.token_hex(8)
        self.namespace = namespace
        self.catalogue = Catalogue(str(root), journal, timeout_s)
        self.catalogue.join(self.name, namespace)
        if is_complete and not self.catalogue.totals().is_complete:
            self.catalogue.end_rebuild()

    def stored(self, number: int, parents: tuple[int, ...] = (), **others: object) -> StoredObject:
        """As ``stored``, of this writer."""
        made = stored(number, parents, self.namespace, **others)  # type: ignore[arg-type]
        return msgspec.structs.replace(made, file=File(self.name, made.file.number))

    def grant(self, num_bytes: int, at_least: int = 8192, capacity_bytes: int = MANY) -> Grant:
        return self.catalogue.grant(self.name, num_bytes, at_least, capacity_bytes)

    def commit(self, *items: StoredObject, replaced: File | None = None) -> list[Committed | None]:
        return self.catalogue.commit(self.name, ((item, replaced) for item in items))

    def store(self, *items: StoredObject, capacity_bytes: int = MANY) -> None:
        """Grant and commit; all must be taken."""
        num_bytes = sum(item.num_bytes for item in items)
        assert self.grant(num_bytes, num_bytes, capacity_bytes).num_bytes == num_bytes
        assert self.commit(*items) == [Committed(item.file, is_paid=True) for item in items]

    def evict(self, limits: Limits, now: int = NOW + 100) -> list[Garbage]:
        return self.catalogue.evict(self.name, limits, now)

    def evicted(self, count: int, pinned: frozenset[File] = frozenset()) -> list[int]:
        """The numbers of at most so many files of what went."""
        return numbers(self.evict(Limits(MANY, count, pinned)))

    def collected(self, found: Iterable[Garbage], keep_bytes: int = 0, capacity_bytes: int = MANY) -> int:
        return self.catalogue.collected(self.name, files(found), keep_bytes, capacity_bytes)

    def touch(self, number: int, now: int) -> None:
        self.catalogue.touch(self.namespace.fingerprint, [object_id(number)], now)

    def loaded(self) -> list[StoredObject]:
        """Everything in its namespace."""
        return [item for part in self.catalogue.load(self.namespace.fingerprint)[1] for item in part]

    def close(self) -> None:
        """As the end of a process: its row stays."""
        self.catalogue.close()
