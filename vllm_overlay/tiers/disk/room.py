# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's and the bookkeeper's threads share: bytes to write, and files that must not go."""

import threading
from collections.abc import Iterable

from vllm_overlay.tiers.disk.catalogue import File

_MOST_GOING = 1 << 16


class Room:
    """Thread-safe, and never waits for more than arithmetic.

    The scheduler's thread takes bytes for stores; the bookkeeper's thread does everything else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writer = ""
        self._granted = 0
        self.in_flight = 0
        """Bytes of stores whose files are not in the catalogue yet."""
        self.largest_bytes = 0
        """The most that a store has asked for."""
        self.is_wanted = False
        """Whether stores are to be expected. Until then nothing need go for them."""

    @property
    def available(self) -> int:
        """Bytes that no store has taken. Negative when a grant was lost under stores."""
        return self._granted - self.in_flight

    def begin(self, writer: str, num_bytes: int) -> None:
        """From now on stores are this writer's, which the catalogue says has so much."""
        with self._lock:
            self._writer, self._granted = writer, num_bytes

    def set_granted(self, num_bytes: int) -> None:
        """The catalogue says what is granted in all: after a call whose end is not known, or 0 without a catalogue."""
        with self._lock:
            self._granted = num_bytes

    def reserve(self, num_bytes: int) -> str:
        """Take bytes for a store; returns whose file it is to be. Empty, and nothing taken, when there are too few."""
        with self._lock:
            self.largest_bytes = max(self.largest_bytes, num_bytes)
            self.is_wanted = True
            if num_bytes > self.available:
                return ""
            self.in_flight += num_bytes
            return self._writer

    def release(self, num_bytes: int, is_paid: bool = False) -> None:
        """A store has left no file that is not counted already: others may take its bytes, unless the catalogue has
        taken them from the grant for its files."""
        with self._lock:
            self.in_flight -= num_bytes
            self._granted -= num_bytes if is_paid else 0

    def grow(self, num_bytes: int) -> None:
        """The catalogue has granted so much more."""
        with self._lock:
            self._granted += num_bytes

    def take_back(self, num_bytes: int) -> int:
        """Up to so much of what no store has taken is not this process's any more; returns how much."""
        with self._lock:
            taken = max(0, min(num_bytes, self.available))
            self._granted -= taken
            return taken


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
