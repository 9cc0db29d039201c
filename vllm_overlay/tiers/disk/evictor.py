# SPDX-License-Identifier: Apache-2.0
"""Keeps room ahead of the stores: asks the catalogue for it, evicts where there is too little, and unlinks what no row
names any more. Then its bytes are free."""

import contextlib
import logging
import os
from collections.abc import Sequence

from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.tiers.disk.catalogue import BATCH_ROWS, File, Garbage, Limits, Totals, limit_bytes
from vllm_overlay.tiers.disk.files.writer import path_of
from vllm_overlay.tiers.disk.messages import ServedNamespace
from vllm_overlay.tiers.disk.room import Room
from vllm_overlay.tiers.disk.site import Seat, Site
from vllm_overlay.tiers.disk.thread_pool import in_threads
from vllm_overlay.tiers.disk.volume import Volume

_THREADS = 4
"""A file system takes as long for each unlink as the disk does, and does several at a time."""
_LARGEST_AHEAD = 2
"""A prompt's chunks come before its snapshot, and must not take the room of that."""
_MOST_STUCK = 4
"""With so many objects that cannot be unlinked nothing more is evicted: it would free no room either."""
_FULL_BYTES = 1 << 20
"""With less free space SQLite may not be able to write."""
logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)


class Unlinker:
    """Called in the bookkeeper's thread. Raises CatalogueError. What cannot be unlinked now stays garbage, and keeps
    its bytes until the next ``run``."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self.num_stuck = 0
        """Of the garbage that ``run`` has met last."""

    def run(self) -> None:
        """Unlink all that this writer has to: what it has replaced, what it has inherited, and what it could not
        unlink before."""
        self.num_stuck = 0
        last: File | None = None
        while garbage := self._seat.catalogue.garbage(self._seat.writer, after=last):
            last = garbage[-1].file
            self.finish(garbage)

    def finish(self, garbage: Sequence[Garbage], keep_bytes: int = 0, capacity_bytes: int = 0) -> int:
        """Unlink these, and the directories whose last ones they are. Returns how many of their bytes are this writer's
        room now, up to ``keep_bytes``."""
        gone = [file for file in in_threads(self._unlinked, garbage, _THREADS) if file is not None]
        self.num_stuck += len(garbage) - len(gone)
        for directory in {os.path.dirname(path_of(self._seat.root, file, 0)) for file in gone}:
            with contextlib.suppress(OSError):  # it has files
                os.rmdir(directory)
        return self._seat.catalogue.collected(self._seat.writer, gone, keep_bytes, capacity_bytes)

    def _unlinked(self, item: Garbage) -> File | None:
        return item.file if self.unlink(item.file, item.world_size) else None

    def unlink(self, file: File, world_size: int) -> bool:
        """Whether no rank has this file any more. Called in whatever thread."""
        is_gone = True
        for rank in range(world_size):
            try:
                self._seat.site.device.unlink(path_of(self._seat.root, file, rank))
            except FileNotFoundError:
                pass
            except OSError as error:
                is_gone = False
                _log.warning("unlink", "disk tier: a file cannot be removed now: %s", error)
        return is_gone


class Evictor:
    """Called in the bookkeeper's thread. Raises CatalogueError and OSError."""

    def __init__(self, seat: Seat, unlinker: Unlinker, room: Room) -> None:
        self._seat, self._unlinker, self._room = seat, unlinker, room
        self._catalogue, self._quota = seat.catalogue, seat.site.quota
        self._ahead: list[Garbage] = []
        """What went before its row since the catalogue could be written last."""
        self.usable_bytes = seat.site.quota.capacity_bytes
        """What all objects together may take, once the catalogue is complete."""
        self._has_looked = False

    def make_room(self, served: ServedNamespace, now: int, may_evict: bool = True) -> tuple[int, bool]:
        """Bring the room to what this process may hold once half of it is gone.

        Returns how many objects were evicted, at most one batch, and whether to call again. ``may_evict`` is False
        until the dead are buried, who may hold what is wanted.
        """
        self._ahead = []
        totals = self._catalogue.totals()
        capacity = self._look_for_room(totals)
        self._give_back(totals.num_bytes - capacity)
        largest = self._room.largest_bytes or self._quota.largest_bytes
        at_once = self._quota.at_once_bytes(capacity, totals.num_writers)
        at_least = max(largest, min(_LARGEST_AHEAD * largest, capacity // 2), at_once)
        target = limit_bytes(totals, capacity, at_least)
        self._give_back(self._room.available - target)  # members that have joined since make the parts smaller
        if self._room.available * 2 >= target and self._room.available >= at_least:
            return 0, False
        grant = self._catalogue.grant(self._seat.writer, max(0, target - self._room.available), at_least, capacity)
        self._room.grow(grant.num_bytes)
        self._give_back(grant.surplus_bytes)
        short_bytes = grant.short_bytes if self._room.is_wanted else max(0, totals.num_bytes - capacity)
        if not short_bytes or self._unlinker.num_stuck >= _MOST_STUCK or not may_evict:
            return 0, False
        return self._evict(served, now, short_bytes, capacity)

    def _give_back(self, num_bytes: int) -> None:
        """As far as no store has taken it."""
        if num_bytes > 0 and (returned := self._room.take_back(num_bytes)):
            self._catalogue.give_back(self._seat.writer, returned)

    def _look_for_room(self, totals: Totals) -> int:
        """What all objects together may take. The first look says so where it is less than the settings promise."""
        device, root = self._seat.site.device, self._seat.root
        volume = Volume(device.free_bytes(root), totals.object_bytes + totals.removing_bytes)
        usable = volume.usable_bytes(self._quota)
        if totals.is_complete:
            self.usable_bytes = usable
            if not self._has_looked:
                self._has_looked = True
                if shortage := volume.shortage(self._quota, root, device.total_bytes(root)):
                    logger.warning("disk tier: %s", shortage)
        return usable

    def _evict(self, served: ServedNamespace, now: int, short_bytes: int, capacity: int) -> tuple[int, bool]:
        claimed: set[File] = set()

        def claim(files: list[File]) -> set[File]:
            claimed.update(served.holds.claim(files))
            return claimed

        removed: list[Garbage] = []
        try:
            limits = Limits(short_bytes, BATCH_ROWS, served.holds.held())
            removed = self._catalogue.evict(self._seat.writer, limits, now, claim)
        finally:
            served.holds.unclaim(claimed - {item.file for item in removed})
        kept = self._unlinker.finish(removed, short_bytes, capacity)
        self._room.grow(kept)
        return len(removed), bool(removed) and kept < short_bytes and not self._unlinker.num_stuck

    def unlink_ahead(self, served: ServedNamespace, now: int) -> int:
        """Called when the catalogue cannot be written. Where that is for a full disk, the files go first that would be
        evicted next. A load of one is a miss, and the next eviction takes its row. Returns how many objects went."""
        if not is_full(self._seat.site):
            return 0
        wanted = sum(item.num_bytes for item in self._ahead) + max(_FULL_BYTES, self._quota.largest_bytes)
        limits = Limits(wanted, len(self._ahead) + BATCH_ROWS, served.holds.held())
        victims = [item for item in self._catalogue.choose_victims(limits, now) if item not in self._ahead]
        gone = [item for item in victims if self._unlinker.unlink(item.file, item.world_size)]
        self._ahead += gone
        sentence = "disk tier: %s is full: removed %d objects so that the catalogue can be written"
        _log.warning("full", sentence, self._seat.root, len(gone))
        return len(gone)


def is_full(site: Site) -> bool:
    """Whether SQLite may not be able to write for want of space. Raises OSError."""
    return site.device.free_bytes(site.root.path) < _FULL_BYTES
