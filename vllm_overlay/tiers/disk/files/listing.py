# SPDX-License-Identifier: Apache-2.0
"""Objects as the headers of their files describe them, each after what it depends on."""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.format import ObjectHeader
from vllm_overlay.tiers.disk.files.namespace import parse_file_name
from vllm_overlay.tiers.disk.files.object_file import BadObject, HeaderReader
from vllm_overlay.tiers.disk.files.scan import FoundFile, scan_directory


class FoundObject(msgspec.Struct, frozen=True, gc=False):
    """An object whose ranks' files all say the same; ``files`` has one a rank. ``mtime`` is the youngest file's."""

    planned: PlannedObject
    mtime: float
    files: tuple[FoundFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


@dataclass(slots=True)
class Listing:
    """What some directories of one namespace hold: whole objects, and files of which no object can be made.

    It also counts the objects that could not be read now. Nothing is known to be wrong with those.
    """

    objects: list[FoundObject] = field(default_factory=list)
    useless: list[FoundFile] = field(default_factory=list)
    num_unread: int = 0

    def add(self, other: "Listing") -> None:
        self.objects.extend(other.objects)
        self.useless.extend(other.useless)
        self.num_unread += other.num_unread


def sort_files(directory: str, useless: list[FoundFile]) -> dict[ObjectId, dict[int, FoundFile]]:
    """The files of one ``<aa>`` by object and rank. Files that have an object's name in another's place are useless.

    Raises OSError when the directory cannot be listed now.
    """
    by_object: dict[ObjectId, dict[int, FoundFile]] = {}
    for file in scan_directory(directory, is_strict=True):
        if (parsed := parse_file_name(file.name)) is None:
            continue
        object_id, rank = parsed
        if object_id.key[:1].hex() == os.path.basename(directory):
            by_object.setdefault(object_id, {})[rank] = file
        else:
            useless.append(file)
    return by_object


def read_found(
    device: Device, fingerprint: str, object_id: ObjectId, files: dict[int, FoundFile], readers: Sequence[HeaderReader]
) -> FoundObject:
    """What the headers of an object say, by the first of ``readers`` that can read them.

    ``files`` are by rank. Those of ranks that do not exist are passed over. Raises BadObject unless every rank has a
    sound file and all say the same.
    """
    first = min(files)
    headers = {first: _read_header(device, files[first].path, readers)}
    ranks = range(headers[first].world_size)
    if not files.keys() >= set(ranks[: 1 + len(files)]):
        raise BadObject(Reason.MISSING)
    headers |= {rank: _read_header(device, files[rank].path, readers) for rank in ranks if rank != first}
    for rank, header in headers.items():
        said = (header.fingerprint.hex(), header.object_id, header.rank, header.world_size, header.planned)
        if said != (fingerprint, object_id, rank, len(ranks), headers[first].planned):
            raise BadObject(Reason.HEADER)
    ordered = tuple(files[rank] for rank in ranks)
    return FoundObject(headers[first].planned, max(file.mtime for file in ordered), ordered)


def _read_header(device: Device, path: str, readers: Sequence[HeaderReader]) -> ObjectHeader:
    for reader in readers[:-1]:
        try:
            return reader(device, path)
        except BadObject as bad:
            if bad.reason is not Reason.HEADER:
                raise
    return readers[-1](device, path)


def parents_first(
    found: Iterable[FoundObject], known: Collection[ObjectId] = ()
) -> tuple[list[FoundObject], list[FoundObject]]:
    """The objects that can be reached, and those that cannot. Each comes after its parents, otherwise the oldest first.

    ``known`` are parents that are there beside them.
    """
    by_id = {item.planned.object_id: item for item in found}
    is_reachable: dict[ObjectId, bool] = dict.fromkeys(known, True)
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
