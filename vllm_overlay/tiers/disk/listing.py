# SPDX-License-Identifier: Apache-2.0
"""Objects as the headers of their files describe them, in the order in which they may be taken in or removed."""

import contextlib
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.device import Device
from vllm_overlay.tiers.disk.format import Identity
from vllm_overlay.tiers.disk.namespace import DiskNamespace, parse_file_name
from vllm_overlay.tiers.disk.object_file import BadObject, read_header
from vllm_overlay.tiers.disk.scan import FoundFile, scan_namespace


def read_planned(
    device: Device,
    root: str,
    namespace: DiskNamespace,
    world_size: int,
    object_id: ObjectId,
    integrity: Integrity = XXH3,
) -> PlannedObject:
    """What the headers of an object say. Raises BadObject unless every rank has a sound file and all say the same."""
    fingerprint = bytes.fromhex(namespace.fingerprint_of(object_id.tag))
    found: PlannedObject | None = None
    for rank in range(world_size):
        header = read_header(device, namespace.path_of(root, object_id, rank), integrity)
        if header.identity != Identity(fingerprint, object_id, rank, world_size, header.payload_bytes):
            raise BadObject(Reason.HEADER)
        planned = header.planned
        if found not in (None, planned):
            raise BadObject(Reason.HEADER)
        found = planned
    assert found is not None
    return found


class FoundObject(msgspec.Struct, frozen=True, gc=False):
    """An object whose ranks' files all say the same. ``mtime`` is the youngest file's."""

    planned: PlannedObject
    mtime: float
    files: tuple[FoundFile, ...]


def parents_first(found: Iterable[FoundObject]) -> tuple[list[FoundObject], list[FoundObject]]:
    """The objects that can be reached, each after its parents and else the oldest first; and those that cannot."""
    by_id = {item.planned.object_id: item for item in found}
    is_reachable: dict[ObjectId, bool] = {}
    opened: set[ObjectId] = set()
    order: list[FoundObject] = []
    for first in sorted(by_id.values(), key=lambda item: item.mtime):
        path = [first]
        while path:
            item = path[-1]
            object_id, parents = item.planned.object_id, item.planned.parents
            if object_id not in opened:
                opened.add(object_id)
                path += [by_id[parent] for parent in parents if parent in by_id and parent not in opened]
                continue
            path.pop()
            if object_id not in is_reachable:
                is_reachable[object_id] = all(is_reachable.get(parent, False) for parent in parents)
                order.append(item)
    return (
        [item for item in order if is_reachable[item.planned.object_id]],
        [item for item in order if not is_reachable[item.planned.object_id]],
    )


@dataclass(slots=True)
class WholeObject:
    """All ranks' files of one object."""

    fingerprint: str
    object_id: ObjectId
    files: list[FoundFile] = field(default_factory=list)
    parents: set[ObjectId] = field(default_factory=set)
    num_children: int = 0
    is_removed: bool = False

    @property
    def mtime(self) -> float:
        return max(file.mtime for file in self.files)


def leaves_first(root: str, fingerprints: list[str], device: Device, integrity: Integrity) -> Iterator[WholeObject]:
    """Every object of these namespaces, none before what depends on it; among those that may go, the oldest first.

    Equal names in several namespaces count as one parent: a snapshot's lies in another directory than itself.
    """
    objects: dict[tuple[str, ObjectId], WholeObject] = {}
    for fingerprint in fingerprints:
        for file in scan_namespace(root, fingerprint):
            if (parsed := parse_file_name(file.name)) is not None:
                item = objects.setdefault((fingerprint, parsed[0]), WholeObject(fingerprint, parsed[0]))
                item.files.append(file)
                item.parents.update(_parents(device, file.path, integrity))
    by_name: defaultdict[ObjectId, list[WholeObject]] = defaultdict(list)
    for (_, object_id), item in objects.items():
        by_name[object_id].append(item)
    for item in objects.values():
        for parent in (parent for object_id in item.parents for parent in by_name[object_id]):
            parent.num_children += 1
    order = itertools.count()
    leaves = [(item.mtime, next(order), item) for item in objects.values() if not item.num_children]
    heapq.heapify(leaves)
    while leaves:
        _, _, item = heapq.heappop(leaves)
        item.is_removed = True
        yield item
        for parent in (parent for object_id in item.parents for parent in by_name[object_id]):
            parent.num_children -= 1
            if not parent.num_children:
                heapq.heappush(leaves, (parent.mtime, next(order), parent))
    yield from (item for item in objects.values() if not item.is_removed)  # forged files that form a ring


def _parents(device: Device, path: str, integrity: Integrity) -> tuple[ObjectId, ...]:
    """What the header says, with the key's checksum or the plain one; nothing when neither verifies."""
    for candidate in dict.fromkeys((integrity, XXH3)):
        with contextlib.suppress(BadObject):
            return read_header(device, path, candidate).parents
    return ()
