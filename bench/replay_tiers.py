# SPDX-License-Identifier: Apache-2.0
"""A tier without bytes, for replays: the production index."""

from collections.abc import Sequence

from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.base import EvictionPolicy


class IndexShelf:
    """Prefix-closed; without a policy the longest unused goes first. What is stored again is not refreshed."""

    def __init__(self, capacity_bytes: int | None, policy: EvictionPolicy[Entry] | None = None) -> None:
        self.index = PrefixIndex(capacity_bytes, policy)
        self.evicted: list[ObjectId] = []
        self._tickets = 0

    def has(self, object_id: ObjectId) -> bool:
        return self.index.has(object_id)

    def use(self, object_ids: Sequence[ObjectId]) -> None:
        """They are loaded now."""
        pinned = self.index.pin(object_ids)
        assert pinned is not None, "a lookup promised what is not there"
        self.index.unpin(object_ids)

    def put(self, planned: PlannedObject) -> bool:
        """Whether it is there now: it was, or it found room and its parents."""
        if self.index.contains(planned.object_id):
            return True
        if self.index.parents_of(planned) is None:
            return False
        self.evicted += [entry.object_id for entry in self.index.evict(planned.num_bytes, keep=planned.parents)]
        self._tickets += 1
        if self.index.reserve(planned, self._tickets) is None:
            return False
        self.index.commit(self._tickets)
        return True
