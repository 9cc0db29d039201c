# SPDX-License-Identifier: Apache-2.0
"""Files that loads and stores of this process need, so that it does not evict them meanwhile."""

import threading
from collections.abc import Iterable

from vllm_overlay.tiers.disk.catalogue import File

_MOST_GOING = 1 << 16


class Holds:
    """Thread-safe, and never waits for more than a few set operations.

    The scheduler's thread holds and releases. The bookkeeper's thread claims what it is about to evict. From then on
    nobody can hold it: a file that went never comes back. Other processes do not see the holds of this one, so a load
    may still find its file missing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[File, int] = {}
        self._going: dict[File, None] = {}

    def hold(self, files: Iterable[File]) -> bool:
        """Hold all of these, or none when one of them is going. Returns whether they are held."""
        wanted = tuple(files)
        with self._lock:
            if not self._going.keys().isdisjoint(wanted):
                return False
            for file in wanted:
                self._counts[file] = self._counts.get(file, 0) + 1
            return True

    def release(self, files: Iterable[File]) -> None:
        """Undo one ``hold``."""
        with self._lock:
            for file in files:
                if (left := self._counts.pop(file, 0) - 1) > 0:
                    self._counts[file] = left

    def held(self) -> frozenset[File]:
        """What somebody holds now."""
        with self._lock:
            return frozenset(self._counts)

    def claim(self, files: Iterable[File]) -> set[File]:
        """Claim and return those that nobody holds. The last 65,536 are remembered: the scheduler hears of each soon,
        and what it has not heard of by then is a miss."""
        with self._lock:
            claimed = {file for file in files if file not in self._counts}
            self._going.update(dict.fromkeys(claimed))
            while len(self._going) > _MOST_GOING:
                del self._going[next(iter(self._going))]
            return claimed

    def unclaim(self, files: Iterable[File]) -> None:
        """These stay after all."""
        with self._lock:
            for file in files:
                self._going.pop(file, None)
