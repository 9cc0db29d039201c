# SPDX-License-Identifier: Apache-2.0
"""Makes a root smaller by hand: leaves first, the oldest first, and nothing that a living process serves."""

import contextlib
import heapq
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vllm_overlay.common.file_lock import is_held, try_lock
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.device import Device
from vllm_overlay.tiers.disk.ledger import Ledger
from vllm_overlay.tiers.disk.namespace import parse_file_name
from vllm_overlay.tiers.disk.object_file import BadObject, read_header
from vllm_overlay.tiers.disk.root import in_use_path
from vllm_overlay.tiers.disk.scan import FoundFile, namespaces_under, scan_namespace, scan_objects

_BATCH_FILES = 64


@dataclass(slots=True)
class Collection:
    """Bytes and files of objects. ``in_use_bytes`` are those of namespaces that were left alone."""

    bytes_before: int = 0
    removed_bytes: int = 0
    removed_files: int = 0
    in_use_bytes: int = 0

    @property
    def bytes_after(self) -> int:
        return self.bytes_before - self.removed_bytes


@dataclass(slots=True)
class WholeObject:
    """All ranks' files of one object."""

    object_id: ObjectId
    files: list[FoundFile] = field(default_factory=list)
    parents: set[ObjectId] = field(default_factory=set)
    num_children: int = 0
    is_removed: bool = False

    @property
    def mtime(self) -> float:
        return max(file.mtime for file in self.files)


def collect(
    root: str,
    max_bytes: int,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    device: Device | None = None,
    integrity: Integrity = XXH3,
) -> Collection:
    """Bring the objects under ``root`` down to ``max_bytes``, as far as namespaces that nobody serves allow.

    Objects whose headers do not verify with ``integrity``, another key's among them, go by age alone.
    Interrupted, it leaves no child without its parent that had one. A process that starts to serve one of these
    namespaces meanwhile stores nothing until this ends. Raises OSError.
    """
    device = device or Device()
    ledger = Ledger(root, device)
    result = Collection()
    with contextlib.ExitStack() as locks:
        idle = []
        for fingerprint in namespaces_under(root):
            num_bytes = sum(file.num_bytes for file in scan_objects(root, fingerprint))
            result.bytes_before += num_bytes
            if _membership(locks, in_use_path(root, fingerprint), dry_run):
                idle.append(fingerprint)
            else:
                result.in_use_bytes += num_bytes
        surplus = result.bytes_before - max_bytes
        paths: list[str] = []
        for item in leaves_first(root, idle, device, integrity) if surplus > 0 else ():
            if result.removed_bytes >= surplus:
                break
            result.removed_bytes += sum(file.num_bytes for file in item.files)
            result.removed_files += len(item.files)
            paths += [file.path for file in item.files]
            if len(paths) >= _BATCH_FILES and not dry_run:
                ledger.remove_files(paths)
                paths = []
            on_bytes(result.removed_bytes, surplus)
        if paths and not dry_run:
            ledger.remove_files(paths)
    return result


def _membership(locks: contextlib.ExitStack, path: str, dry_run: bool) -> bool:
    """Whether nobody serves the namespace of this lock; but for a dry run, nobody begins to either until the end."""
    if dry_run:
        return not is_held(path)
    fd = try_lock(path)
    if fd is None:
        return False
    locks.callback(os.close, fd)
    return True


def leaves_first(root: str, fingerprints: list[str], device: Device, integrity: Integrity) -> Iterator[WholeObject]:
    """Every object of these namespaces, none before what depends on it; among those that may go, the oldest first.

    Equal names in several namespaces count as one parent: a snapshot's lies in another directory than itself.
    """
    objects: dict[tuple[str, ObjectId], WholeObject] = {}
    for fingerprint in fingerprints:
        for file in scan_namespace(root, fingerprint):
            if (parsed := parse_file_name(file.name)) is not None:
                item = objects.setdefault((fingerprint, parsed[0]), WholeObject(parsed[0]))
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
