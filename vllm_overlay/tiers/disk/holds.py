# SPDX-License-Identifier: Apache-2.0
"""Objects that loads and stores of this process need, so that it does not evict them meanwhile."""

import threading
from collections import Counter
from collections.abc import Iterable

from vllm_overlay.planner.objects import ObjectId


class Holds:
    """Thread-safe, and never waits for more than a few set operations.

    The scheduler's thread holds and releases. The bookkeeper's thread claims what it is about to evict. From then on
    nobody can hold it. Other processes do not see the holds of this one: a load may still find an object missing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[ObjectId] = Counter()
        self._going: set[ObjectId] = set()

    def hold(self, object_ids: Iterable[ObjectId]) -> bool:
        """Hold all of these, or none when one of them is going. Returns whether they are held."""
        wanted = tuple(object_ids)
        with self._lock:
            if not self._going.isdisjoint(wanted):
                return False
            self._counts.update(wanted)
            return True

    def release(self, object_ids: Iterable[ObjectId]) -> None:
        """Undo one ``hold``."""
        with self._lock:
            for object_id in object_ids:
                self._counts[object_id] -= 1
                if self._counts[object_id] <= 0:
                    del self._counts[object_id]

    def held(self) -> frozenset[ObjectId]:
        """What somebody holds now."""
        with self._lock:
            return frozenset(self._counts)

    def claim(self, object_ids: Iterable[ObjectId]) -> set[ObjectId]:
        """Claim and return those that nobody holds. They are going from now on."""
        with self._lock:
            claimed = {object_id for object_id in object_ids if object_id not in self._counts}
            self._going |= claimed
            return claimed

    def going(self) -> frozenset[ObjectId]:
        """What is claimed now."""
        with self._lock:
            return frozenset(self._going)

    def unclaim(self, object_ids: Iterable[ObjectId]) -> None:
        """End the claim: these stay after all, or are gone and may come again."""
        with self._lock:
            self._going.difference_update(object_ids)
