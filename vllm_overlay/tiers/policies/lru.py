# SPDX-License-Identifier: Apache-2.0
"""The longest unused first."""

import heapq
from typing import TypeVar

from vllm_overlay.tiers.policies.base import EvictionPolicy

T = TypeVar("T")

_Offered = tuple[int, int, int, T]
"""Last use, end in tokens (negative), sequence number and item: the order in which they go."""
_SLACK = 64


class LeastRecentlyUsed(EvictionPolicy[T]):
    """The longest unused first; of those used at once, the one deepest in its prompt.

    It is a heap, but for what was added last: when a leaf goes, what it hung on is offered and is often the next to go.
    Outdated items are skipped when they surface, and swept when an item is added while they are the majority. Every
    call is O(log n) amortised. Memory is O(n) of the most that was offered at once.
    """

    def __init__(self) -> None:
        self._heap: list[_Offered[T]] = []
        self._latest: _Offered[T] | None = None
        self._current: dict[T, int] = {}
        self._sequence = 0

    def add(self, item: T, last_use: int, end_tokens: int) -> None:
        self._sequence += 1
        self._current[item] = self._sequence
        latest, self._latest = self._latest, (last_use, -end_tokens, self._sequence, item)
        if latest is not None:
            heapq.heappush(self._heap, latest)
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._sweep()

    def discard(self, item: T) -> None:
        self._current.pop(item, None)

    def pop(self) -> T | None:
        heap, current = self._heap, self._current
        latest, self._latest = self._latest, None
        while heap or latest is not None:
            _, _, sequence, item = heapq.heappop(heap) if latest is None else heapq.heappushpop(heap, latest)
            latest = None
            if current.get(item) == sequence:
                del current[item]
                return item
        return None

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if self._current.get(entry[3]) == entry[2]]
        heapq.heapify(self._heap)
