# SPDX-License-Identifier: Apache-2.0
"""Unlinks files that no row names any more, and says so: then their bytes are free."""

import logging
from collections.abc import Iterable, Sequence

from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.tiers.disk.catalogue import File, Garbage
from vllm_overlay.tiers.disk.files.writer import paths_of
from vllm_overlay.tiers.disk.site import Seat
from vllm_overlay.tiers.disk.thread_pool import in_threads

_THREADS = 4
"""A file system takes as long for each unlink as the disk does, and does several at a time."""
_log = RateLimitedLog(logging.getLogger(__name__))


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
            self._unlink(garbage, 0, 0)

    def finish(self, removed: Sequence[Garbage], keep_bytes: int, capacity_bytes: int) -> int:
        """Unlink what was just evicted. Returns how many of its bytes are this writer's room now."""
        return self._unlink(removed, keep_bytes, capacity_bytes) if removed else 0

    def _unlink(self, garbage: Sequence[Garbage], keep_bytes: int, capacity_bytes: int) -> int:
        is_gone = in_threads(lambda item: self.unlink(item.file, item.world_size), garbage, _THREADS)
        gone = [item.file for item, is_this_gone in zip(garbage, is_gone, strict=True) if is_this_gone]
        self.num_stuck += len(garbage) - len(gone)
        return self._seat.catalogue.collected(self._seat.writer, gone, keep_bytes, capacity_bytes) if gone else 0

    def unlink(self, file: File, world_size: int) -> bool:
        """Whether no rank has this file any more. Called in whatever thread."""
        return self.unlink_all(paths_of(self._seat.root, file, world_size))

    def unlink_all(self, paths: Iterable[str]) -> bool:
        """Whether none of these files is there any more."""
        is_gone = True
        for path in paths:
            try:
                self._seat.site.device.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                is_gone = False
                _log.warning("unlink", "disk tier: a file cannot be removed now: %s", error)
        return is_gone
