# SPDX-License-Identifier: Apache-2.0
"""A process's lease as its scheduler sees it: bytes for new files, and spares.

A spare is an evicted object's files, kept to be written over: what has its blocks takes bytes faster than a new file.
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
        self._spare = 0
        self._spares: defaultdict[int, list[RecycledFile]] = defaultdict(list)

    @property
    def available(self) -> int:
        """Bytes for new files."""
        return self._available

    @property
    def spare_bytes(self) -> int:
        """Bytes of spares, also of those that are about to be unlinked."""
        return self._spare

    def is_low(self, batch_bytes: int) -> bool:
        """Whether the reclaimer should bring it to a batch again, ahead of the stores."""
        return self._available < batch_bytes // 4 or self._available + self._spare < batch_bytes // 2

    def must_shrink(self, room: int) -> bool:
        """Whether ``room`` is so much less than none that spares must go.

        Not for what stores are writing over spares now, which counts twice: in the file system and in the lease.
        """
        return room < -self._over

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def spares(self) -> list[RecycledFile]:
        """What lies by now."""
        with self._lock:
            return [spare for of_size in self._spares.values() for spare in of_size]

    def take(self, num_bytes: int) -> tuple[str, ...] | None:
        """Set bytes aside for a store, in the files of a spare of just this size or in new ones: (). None: no room."""
        with self._lock:
            if of_size := self._spares.get(num_bytes):
                self._spare -= num_bytes
                self._over += num_bytes
                self._in_flight += num_bytes
                return of_size.pop(0).paths  # the oldest: none lies by for ever
            if num_bytes > self._available:
                return None
            self._available -= num_bytes
            self._in_flight += num_bytes
            return ()

    def settle(self, num_bytes: int, is_over: bool = False) -> None:
        """A store that took bytes has ended: what it left in the lease comes back with the next ``refill``."""
        with self._lock:
            self._in_flight -= num_bytes
            self._over -= num_bytes if is_over else 0

    def put_back(self, spare: RecycledFile) -> None:
        """A spare for stores, whose bytes are in the lease already."""
        with self._lock:
            self._spare += spare.num_bytes
            self._spares[spare.num_bytes].append(spare)

    def take_spares(self) -> list[RecycledFile]:
        """All of them, to be unlinked: ``scrapped`` then says that their bytes can be had with the next ``refill``."""
        with self._lock:
            taken = [spare for of_size in self._spares.values() for spare in of_size]
            self._spares.clear()
            return taken

    def scrapped(self, spare: RecycledFile) -> None:
        with self._lock:
            self._spare -= spare.num_bytes

    def drop_all(self) -> None:
        """The lease is lost, and with it what no store has taken."""
        with self._lock:
            self._spares.clear()
            self._available = self._spare = 0

    def refill(self, leased_bytes: int, batch_bytes: int, room: int) -> tuple[int, int]:
        """The new lease and how many bytes short of a batch, spares included, it is. Called with the ledger locked.

        ``room`` may be added to all leases; when it is negative, what no store has taken is given back.
        """
        with self._lock:
            idle = leased_bytes - self._in_flight - self._spare
            wanted = batch_bytes - idle - self._spare
            granted = max(min(wanted, room), -max(idle, 0))
            self._available = max(0, idle + granted)
            return leased_bytes + granted, max(0, wanted - room)
