# SPDX-License-Identifier: Apache-2.0
"""Objects and catalogues for the tests of the catalogue."""

import hashlib
from pathlib import Path

from tests.tiers.disk.catalogue.check import check
from tests.waiting import PATIENCE_S
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue import Catalogue, Name, Namespace, RemovedObject, StoredObject

CHUNKS = Namespace("a" * 64, "a" * 64)
SNAPSHOTS = Namespace("b" * 64, "a" * 64)
OTHERS = Namespace("c" * 64, "c" * 64)
MIB = 1 << 20
NOW = 1_000


def object_id(number: int, tag: str = "f0") -> ObjectId:
    return ObjectId(tag, hashlib.sha256(b"%d" % number).digest())


def stored(
    number: int,
    parents: tuple[int, ...] = (),
    namespace: Namespace = CHUNKS,
    num_bytes: int = 8192,
    last_use: int = NOW,
    tag: str = "f0",
) -> StoredObject:
    """An object of one rank, a chunk unless ``tag`` says otherwise; its parents are chunks."""
    planned = PlannedObject(object_id(number, tag), tuple(map(object_id, parents)), 64, 128, max(1, num_bytes - 4096))
    return StoredObject(namespace.fingerprint, planned, 1, num_bytes, number, last_use)


def name(number: int, namespace: Namespace = CHUNKS, tag: str = "f0") -> Name:
    return Name(namespace.fingerprint, object_id(number, tag))


def names(removed: list[RemovedObject]) -> list[Name]:
    return [item.name for item in removed]


def numbers(found: list[StoredObject]) -> list[int]:
    """What ``stored`` was called with."""
    return [item.ticket for item in found]


def loaded(catalogue: Catalogue, namespace: Namespace = CHUNKS) -> list[StoredObject]:
    """Everything in a namespace and its partner."""
    return [item for part in catalogue.load([namespace.fingerprint])[1] for item in part]


def member(root: Path, *served: Namespace, timeout_s: float = PATIENCE_S) -> Catalogue:
    """Of a catalogue that is complete from now on."""
    catalogue = Catalogue(str(root), timeout_s)
    catalogue.join(served or (CHUNKS, SNAPSHOTS), NOW)
    if catalogue.begin_rebuild():
        catalogue.end_rebuild()
    return catalogue


def store(catalogue: Catalogue, *items: StoredObject, capacity_bytes: int = 1 << 40) -> None:
    """Grant and commit; all must be taken."""
    num_bytes = sum(item.num_bytes for item in items)
    assert catalogue.grant(num_bytes, num_bytes, capacity_bytes).num_bytes == num_bytes
    assert catalogue.commit(items).refused == []


def assert_sound(catalogue: Catalogue) -> None:
    assert check(catalogue) == []
