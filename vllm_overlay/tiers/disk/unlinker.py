# SPDX-License-Identifier: Apache-2.0
"""Unlinks files that no row names any more, and says so: then their bytes are free."""

import logging
from collections.abc import Sequence

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
            self.finish(garbage)

    def finish(self, garbage: Sequence[Garbage], keep_bytes: int = 0, capacity_bytes: int = 0) -> int:
        """Unlink these. Returns how many of their bytes are this writer's room now, up to ``keep_bytes``."""
        gone = [file for file in in_threads(self._unlinked, garbage, _THREADS) if file is not None]
        self.num_stuck += len(garbage) - len(gone)
        return self._seat.catalogue.collected(self._seat.writer, gone, keep_bytes, capacity_bytes)

    def _unlinked(self, item: Garbage) -> File | None:
        return item.file if self.unlink(item.file, item.world_size) else None

    def unlink(self, file: File, world_size: int) -> bool:
        """Whether no rank has this file any more. Called in whatever thread."""
        is_gone = True
        for path in paths_of(self._seat.root, file, world_size):
            try:
                self._seat.site.device.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                is_gone = False
                _log.warning("unlink", "disk tier: a file cannot be removed now: %s", error)
        return is_gone
