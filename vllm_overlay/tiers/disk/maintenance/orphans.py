# SPDX-License-Identifier: Apache-2.0
"""Adopts or removes files of objects that the catalogue does not know. A killed process leaves such files."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import Catalogue, Name, Refusal, StoredObject
from vllm_overlay.tiers.disk.catalogue.room import Room
from vllm_overlay.tiers.disk.files.device import Device, is_missing, is_temporary, remove_quietly
from vllm_overlay.tiers.disk.files.listing import FoundObject, Listing, parents_first, sort_files
from vllm_overlay.tiers.disk.files.namespace import object_path
from vllm_overlay.tiers.disk.files.object_file import HeaderReader
from vllm_overlay.tiers.disk.files.scan import (
    FoundFile,
    fan_out_directories,
    is_orphan,
    scan_directory,
    unlink_if_same,
    was_written_before,
)
from vllm_overlay.tiers.disk.maintenance.header_scan import HeaderScan
from vllm_overlay.tiers.disk.maintenance.rebuild import as_stored
from vllm_overlay.tiers.disk.maintenance.remover import Remover

_ROOM_S = 10.0
"""How long an object waits for the room that it takes in the catalogue."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Age:
    """What is younger than ``written_before``, in seconds since the epoch, may be on its way.

    ``is_alone`` says that no other process uses the root.
    """

    written_before: float
    is_alone: bool


class Orphans:
    """Called in the recovery thread. What is adopted takes its bytes from this process's room."""

    def __init__(
        self,
        catalogue: Catalogue,
        root: str,
        scan: HeaderScan,
        device: Device,
        room: Room,
        most_bytes: int,
        take: Callable[[int], bool],
        remover: Remover,
        is_closing: Callable[[], bool],
    ) -> None:
        """``take`` takes bytes from ``room``, or tells the one who fills it how many are wanted.

        An object of more than ``most_bytes`` is not worth what it would displace.
        """
        self._catalogue = catalogue
        self._root = root
        self._scan = scan
        self._device = device
        self._room = room
        self._most_bytes = most_bytes
        self._take = take
        self._remover = remover
        self._is_closing = is_closing

    def look_after(self, fingerprint: str, partner: str, readers: Sequence[HeaderReader], age: Age) -> bool:
        """Adopt whole objects of a namespace, and remove what is of no use and not on its way.

        ``partner`` is the namespace in which the objects' parents lie. What builds on a file that cannot be read now is
        of use once the file can be read. Returns False while something is left that time may settle. Raises
        CatalogueError, OSError.
        """
        listing = Listing()
        for directory in fan_out_directories(self._root, fingerprint, is_strict=True):
            self._sweep(directory, age)
            if self._scan.is_ours(directory):
                self._find(fingerprint, directory, readers, listing)
        is_clean = not listing.num_unread
        for item in self._in_order(listing):
            (stored,) = as_stored(fingerprint, [item])
            is_too_large = stored.num_bytes > self._most_bytes
            refusal = None if is_too_large else self._adopt(stored)
            if (
                is_too_large
                or refusal is Refusal.OTHER_PARENTS
                or (refusal is Refusal.PARENT and not self._has_parents(partner, item, listing.useless))
            ):
                listing.useless.extend(item.files)
            elif refusal is not None:
                is_clean = False
        for file in listing.useless:
            is_old = was_written_before(file, age.written_before) and not self._is_closing()
            is_clean &= is_old and unlink_if_same(self._device, file)
        return is_clean

    def remove(self, fingerprint: str, age: Age) -> None:
        """Remove what the catalogue does not know of a namespace that nobody will serve again."""
        for directory in fan_out_directories(self._root, fingerprint, is_strict=True):
            self._sweep(directory, age)
            unknown: list[FoundFile] = []
            by_object = sort_files(directory, unknown)
            known = self._known(fingerprint, list(by_object))
            unknown += [file for each, files in by_object.items() if each not in known for file in files.values()]
            for file in unknown:
                unlink_if_same(self._device, file)

    def _adopt(self, item: StoredObject) -> Refusal | None:
        deadline = time.monotonic() + _ROOM_S
        try:
            while True:
                if not self._remover.is_there(item):  # somebody evicts it: nothing else need go for it
                    return Refusal.GONE
                if self._take(item.num_bytes):
                    break
                if self._is_closing() or time.monotonic() > deadline:
                    return Refusal.NO_GRANT
                time.sleep(_POLL_S)
        finally:
            self._take(0)
        try:
            with self._room.settling:
                refused = self._catalogue.commit([item], self._remover.is_there).refused
                if not refused:
                    self._room.commit(item.num_bytes)
        except BaseException:
            self._room.release(item.num_bytes)
            raise
        if not refused:
            return None
        self._room.release(item.num_bytes)
        return refused[0][1]

    def _in_order(self, listing: Listing) -> list[FoundObject]:
        """Each after its parents, wherever else those may be."""
        found = {item.planned.object_id for item in listing.objects}
        elsewhere = {parent for item in listing.objects for parent in item.planned.parents if parent not in found}
        order, circular = parents_first(listing.objects, elsewhere)
        listing.useless.extend(file for item in circular for file in item.files)
        return order

    def _has_parents(self, partner: str, item: FoundObject, useless: Sequence[FoundFile]) -> bool:
        """Whether all parents have files that are of use, or may be when they can be read."""
        gone = {file.path for file in useless}
        paths = [object_path(self._root, partner, parent, 0) for parent in item.planned.parents]
        return all(path not in gone and not is_missing(self._device, path) for path in paths)

    def _sweep(self, directory: str, age: Age) -> None:
        for file in scan_directory(directory):
            if is_temporary(file.name) and is_orphan(file, age.is_alone):
                remove_quietly(self._device, file.path)

    def _find(self, fingerprint: str, directory: str, readers: Sequence[HeaderReader], listing: Listing) -> None:
        by_object = sort_files(directory, listing.useless)
        known = self._known(fingerprint, list(by_object))
        for object_id, files in by_object.items():
            if (num_ranks := known.get(object_id)) is None:
                self._scan.read(fingerprint, object_id, files, readers, listing)
            else:
                listing.useless.extend(file for rank, file in files.items() if rank >= num_ranks)

    def _known(self, fingerprint: str, object_ids: Sequence[ObjectId]) -> dict[ObjectId, int]:
        """Those that the catalogue knows, and how many ranks each has."""
        found = self._catalogue.find(Name(fingerprint, object_id) for object_id in object_ids)
        return {item.planned.object_id: item.world_size for item in found}
