# SPDX-License-Identifier: Apache-2.0
"""Keeps room ahead of the stores: asks the catalogue for it, and evicts where there is too little."""

import logging
import time
from dataclasses import dataclass
from functools import partial

from vllm_overlay.tiers.disk.catalogue import BATCH_ROWS, Catalogue, Limits, Name, Totals, limit_bytes
from vllm_overlay.tiers.disk.catalogue.room import Room
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.maintenance.remover import Remover
from vllm_overlay.tiers.disk.updates import ServedNamespace

_LARGEST_AHEAD = 2
"""A prompt's chunks come before its snapshot, and must not take the room of that."""
_MOST_STUCK = 4
"""With so many objects that cannot be unlinked nothing more is evicted: it would free no room either."""
_FULL_BYTES = 1 << 20
"""With less free space SQLite may not be able to write."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quota:
    """In bytes. ``largest_bytes`` is the most that an object may take, in all ranks' files together."""

    capacity_bytes: int
    min_free_bytes: int
    largest_bytes: int


class Evictor:
    """Called in the bookkeeper's thread. Raises CatalogueError and OSError."""

    def __init__(
        self, catalogue: Catalogue, remover: Remover, room: Room, quota: Quota, root: str, device: Device
    ) -> None:
        self._catalogue = catalogue
        self._remover = remover
        self._room = room
        self._quota = quota
        self._root = root
        self._device = device
        self._unrecorded: dict[Name, int] = {}
        """Objects whose files are gone and whose rows are not, and their bytes."""
        self.has_evicted_others = False
        """Whether namespaces that this process does not serve may be empty by now."""

    def make_room(self, served: ServedNamespace) -> tuple[int, bool]:
        """Bring the room to what this process may hold once half of it is gone.

        Returns how many objects were evicted, at most one batch, and whether to call again.
        """
        totals = self._catalogue.totals()
        capacity = self._usable_bytes(totals)
        self._give_back(totals.num_bytes - capacity)
        largest = self._room.largest_bytes or self._quota.largest_bytes
        at_least = max(largest, min(_LARGEST_AHEAD * largest, capacity // 2), self._room.wanted_bytes)
        target = limit_bytes(totals, capacity, at_least)
        self._give_back(self._room.available - target)  # members that have joined since make the parts smaller
        if self._room.available * 2 >= target and self._room.available >= at_least:
            return 0, False
        grant = self._catalogue.grant(max(0, target - self._room.available), at_least, capacity)
        self._room.grow(grant.num_bytes)
        self._give_back(grant.surplus_bytes)
        if not grant.short_bytes or self._remover.num_stuck >= _MOST_STUCK:
            return 0, False
        return self._evict(served, grant.short_bytes, capacity)

    def _give_back(self, num_bytes: int) -> None:
        """As far as no store has taken it."""
        if num_bytes > 0 and (returned := self._room.take_back(num_bytes)):
            self._catalogue.give_back(returned)

    def _usable_bytes(self, totals: Totals) -> int:
        """What all objects together may take: a file system smaller than the capacity is the limit."""
        free_bytes = self._device.free_bytes(self._root) - self._quota.min_free_bytes
        return max(0, min(self._quota.capacity_bytes, totals.object_bytes + totals.removing_bytes + free_bytes))

    def _evict(self, served: ServedNamespace, short_bytes: int, capacity: int) -> tuple[int, bool]:
        pinned = self._held_names(served)
        claimed: set[Name] = set()
        try:
            limits = Limits(short_bytes, BATCH_ROWS, pinned)
            removed = self._catalogue.evict(limits, int(time.time()), partial(_claim, served, claimed))
        except BaseException:
            served.holds.unclaim(name.object_id for name in claimed)
            raise
        served.holds.unclaim(name.object_id for name in claimed.difference(item.name for item in removed))
        self.has_evicted_others |= any(item.name.fingerprint not in served.namespace.fingerprints for item in removed)
        kept = self._remover.finish(removed, short_bytes, capacity)
        self._room.grow(kept)
        return len(removed), bool(removed) and kept < short_bytes and not self._remover.num_stuck

    def _held_names(self, served: ServedNamespace) -> frozenset[Name]:
        return frozenset(Name(served.namespace.fingerprint_of(each.tag), each) for each in served.holds.held())

    def unlink_unrecorded(self, served: ServedNamespace) -> int:
        """Called when the catalogue cannot be written. Where that is for a full disk, files go first, and their rows
        when they can; returns how many objects went."""
        if self._device.free_bytes(self._root) >= _FULL_BYTES:
            return 0
        wanted = sum(self._unrecorded.values()) + max(_FULL_BYTES, self._quota.largest_bytes)
        limits = Limits(wanted, len(self._unrecorded) + BATCH_ROWS, self._held_names(served))
        victims = self._catalogue.choose_victims(limits, int(time.time()))
        may_go = _claim(served, set(), [item.name for item in victims])
        chosen = [item for item in victims if item.name in may_go and item.name not in self._unrecorded]
        for item in chosen:
            self._remover.unlink_all(self._remover.paths_of(item.name, item.world_size))
            self._unrecorded[item.name] = item.num_bytes
        logger.warning(
            "disk tier: %s is full: removed %d objects so that the catalogue can be written", self._root, len(chosen)
        )
        return len(chosen)

    def record(self, served: ServedNamespace) -> None:
        """Take the rows of what ``unlink_unrecorded`` has unlinked away, but for what was stored again since."""
        if self._unrecorded:
            again = {item.name for item in self._catalogue.find(self._unrecorded) if self._remover.is_there(item)}
            self._remover.remove(name for name in self._unrecorded if name not in again)
            served.holds.unclaim(name.object_id for name in again)
            self._unrecorded = {}


def _claim(served: ServedNamespace, claimed: set[Name], names: list[Name]) -> set[Name]:
    """Those that may go; what is of the served namespace is claimed, and added to ``claimed``."""
    own = served.namespace
    ours = {name.object_id: name for name in names if name.fingerprint == own.fingerprint_of(name.object_id.tag)}
    free = {ours[object_id] for object_id in served.holds.claim(ours)}
    claimed.update(free)
    return free.union(name for name in names if ours.get(name.object_id) != name)
