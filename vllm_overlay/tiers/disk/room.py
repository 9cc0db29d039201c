# SPDX-License-Identifier: Apache-2.0
"""Bytes that this process may write: what the catalogue has granted its writer, less what its stores have taken."""

import threading


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

    def commit(self, num_bytes: int) -> None:
        """A store's files are in the catalogue, which took their bytes from the grant."""
        with self._lock:
            self.in_flight -= num_bytes
            self._granted -= num_bytes

    def release(self, num_bytes: int) -> None:
        """A store has left no file that is not counted already: others may take its bytes."""
        with self._lock:
            self.in_flight -= num_bytes

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
