# SPDX-License-Identifier: Apache-2.0
"""What to drop first. The index offers only objects that may go; the policy orders them."""

import heapq
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

T = TypeVar("T")

_SLACK = 64


class EvictionPolicy(ABC, Generic[T]):
    """Orders the objects that may be evicted now: committed, unpinned, with nothing depending on them.

    Called by the index alone, which adds an object when it becomes evictable and discards it when it no longer is,
    so that leaves always go before what they hang on.
    """

    @abstractmethod
    def add(self, item: T, last_use: int, end_tokens: int) -> None:
        """``item`` may be evicted from now on; again with a new ``last_use`` when it was used meanwhile."""

    @abstractmethod
    def discard(self, item: T) -> None:
        """``item`` may no longer be evicted. Does nothing when it was not added."""

    @abstractmethod
    def pop(self) -> T | None:
        """Takes out the item to evict first, None when there is none."""

    @abstractmethod
    def __len__(self) -> int:
        """How many items may be evicted."""


class LeastRecentlyUsed(EvictionPolicy[T]):
    """The longest unused first; of those used at once, the one deepest in its prompt.

    A heap whose outdated items are skipped when they surface, and swept when they are the majority: every call is
    O(log n) amortised, memory O(n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, T]] = []
        self._current: dict[T, int] = {}
        self._sequence = 0

    def add(self, item: T, last_use: int, end_tokens: int) -> None:
        self._sequence += 1
        self._current[item] = self._sequence
        heapq.heappush(self._heap, (last_use, -end_tokens, self._sequence, item))
        self._sweep()

    def discard(self, item: T) -> None:
        self._current.pop(item, None)
        self._sweep()

    def pop(self) -> T | None:
        while self._heap:
            _, _, sequence, item = heapq.heappop(self._heap)
            if self._current.get(item) == sequence:
                self.discard(item)
                return item
        return None

    def __len__(self) -> int:
        return len(self._current)

    def _sweep(self) -> None:
        if len(self._heap) <= 2 * len(self._current) + _SLACK:
            return
        self._heap = [entry for entry in self._heap if self._current.get(entry[3]) == entry[2]]
        heapq.heapify(self._heap)
