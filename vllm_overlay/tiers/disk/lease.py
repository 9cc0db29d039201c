# SPDX-License-Identifier: Apache-2.0
"""A process's lease as its scheduler sees it: bytes for new files, and recycled files.

Recycled files are those of an evicted object, kept to be written over: a file that has its blocks takes bytes faster
than a new one.
"""

import threading
from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecycledFile:
    """One evicted object's files under temporary names, one a rank. ``num_bytes`` is the size of all together."""

    paths: tuple[str, ...]
    num_bytes: int


class Lease:
    """Thread-safe, and never waits for more than arithmetic.

    The scheduler's thread takes bytes for stores and settles them; the reclaimer's thread does everything else.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._available = 0
        self._in_flight = 0
        self._over = 0
        self._recycled_bytes = 0
        self._recycled: defaultdict[int, list[RecycledFile]] = defaultdict(list)

    @property
    def available(self) -> int:
        """Bytes for new files."""
        return self._available

    @property
    def recycled_bytes(self) -> int:
        """Bytes of recycled files, also of those that are about to be unlinked."""
        return self._recycled_bytes

    def is_low(self, batch_bytes: int) -> bool:
        """Whether the reclaimer should bring it to a batch again, ahead of the stores."""
        return self._available < batch_bytes // 4 or self._available + self._recycled_bytes < batch_bytes // 2

    def must_shrink(self, room: int) -> bool:
        """Whether ``room`` is so much less than none that recycled files must go.

        Not for what stores write over recycled files now, which counts twice: in the file system and in the lease.
        """
        return room < -self._over

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def recycled(self) -> list[RecycledFile]:
        """What lies by now."""
        with self._lock:
            return [recycled for of_size in self._recycled.values() for recycled in of_size]

    def reserve(self, num_bytes: int) -> tuple[str, ...] | None:
        """Set bytes aside for a store, in recycled files of just this size or in new ones: (). None: no room."""
        with self._lock:
            if of_size := self._recycled.get(num_bytes):
                self._recycled_bytes -= num_bytes
                self._over += num_bytes
                self._in_flight += num_bytes
                return of_size.pop(0).paths  # the oldest: none lies by for ever
            if num_bytes > self._available:
                return None
            self._available -= num_bytes
            self._in_flight += num_bytes
            return ()

    def commit(self, num_bytes: int, is_over: bool = False) -> None:
        """A store that took bytes has ended: what it left in the lease comes back with the next ``refill``."""
        with self._lock:
            self._in_flight -= num_bytes
            self._over -= num_bytes if is_over else 0

    def put_back(self, recycled: RecycledFile) -> None:
        """A recycled file for stores, whose bytes are in the lease already."""
        with self._lock:
            self._recycled_bytes += recycled.num_bytes
            self._recycled[recycled.num_bytes].append(recycled)

    def take_recycled(self) -> list[RecycledFile]:
        """All of them, to be unlinked: ``scrapped`` then says that their bytes can be had with the next ``refill``."""
        with self._lock:
            taken = [recycled for of_size in self._recycled.values() for recycled in of_size]
            self._recycled.clear()
            return taken

    def scrapped(self, recycled: RecycledFile) -> None:
        with self._lock:
            self._recycled_bytes -= recycled.num_bytes

    def drop_all(self) -> None:
        """The lease is lost, and with it what no store has taken."""
        with self._lock:
            self._recycled.clear()
            self._available = self._recycled_bytes = 0

    def refill(self, leased_bytes: int, batch_bytes: int, room: int) -> tuple[int, int]:
        """The new lease and how many bytes it is short of a batch, recycled files included. The ledger is locked.

        ``room`` may be added to all leases; when it is negative, what no store has taken is given back.
        """
        with self._lock:
            idle = leased_bytes - self._in_flight - self._recycled_bytes
            wanted = batch_bytes - idle - self._recycled_bytes
            granted = max(min(wanted, room), -max(idle, 0))
            self._available = max(0, idle + granted)
            return leased_bytes + granted, max(0, wanted - room)
