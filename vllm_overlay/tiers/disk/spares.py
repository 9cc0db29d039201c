# SPDX-License-Identifier: Apache-2.0
"""Files of evicted objects, kept to be written over: a file that has its blocks takes bytes faster than a new one."""

import threading
from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spare:
    """One evicted object's files under temporary names, one a rank. ``num_bytes`` is the size of all together."""

    paths: tuple[str, ...]
    num_bytes: int


class Spares:
    """The janitor lays them by, the scheduler's thread takes them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_size: defaultdict[int, list[Spare]] = defaultdict(list)
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def lay_by(self, spare: Spare) -> None:
        with self._lock:
            self._by_size[spare.num_bytes].append(spare)
            self._num_bytes += spare.num_bytes

    def take(self, num_bytes: int) -> Spare | None:
        """One of exactly this size, the last laid by."""
        with self._lock:
            of_size = self._by_size.get(num_bytes)
            if not of_size:
                return None
            self._num_bytes -= num_bytes
            return of_size.pop()

    def take_all(self) -> list[Spare]:
        with self._lock:
            taken = [spare for of_size in self._by_size.values() for spare in of_size]
            self._by_size.clear()
            self._num_bytes = 0
            return taken
