# SPDX-License-Identifier: Apache-2.0
"""Tiers without bytes, for replays: the production index and admission, and a tier that no parent binds."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_overlay.planner.batched_hits import BatchedHits
from vllm_overlay.planner.coverage import HitSource
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.admission import UseCounter, WriteRate
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed


@dataclass(slots=True, eq=False)
class Held:
    """One object of a replayed tier."""

    object_id: ObjectId
    num_bytes: int
    end_tokens: int
    last_use: int


class Shelf(Protocol):
    """What a replayed tier holds. It calls ``evicted`` with what made room, ``stored`` with what is new."""

    evicted: Callable[[Held], object]
    stored: Callable[[ObjectId], object]

    def tick(self) -> None:
        """The next request comes."""
        ...

    def has(self, object_id: ObjectId) -> bool: ...

    def hits(self, geometry: Geometry, keys: Sequence[bytes], num_tokens: int) -> HitSource:
        """What the planner asks for one prompt."""
        ...

    def use(self, object_ids: Sequence[ObjectId]) -> None:
        """They are loaded now."""
        ...

    def put(self, planned: PlannedObject) -> bool:
        """Whether it is there now: it was, or it found room and its parents."""
        ...

    def drop(self, object_id: ObjectId) -> None: ...

    def clear(self) -> None: ...


def _ignore(_: object) -> None:
    """Nobody wants to know."""


class IndexShelf:
    """The production index: prefix-closed, without a policy the longest unused first. What is stored again is not
    refreshed."""

    def __init__(self, capacity_bytes: int | None, policy: EvictionPolicy[Entry] | None = None) -> None:
        self.index = PrefixIndex(capacity_bytes, policy)
        self.evicted: Callable[[Held], object] = _ignore
        self.stored: Callable[[ObjectId], object] = _ignore
        self._tickets = 0

    def tick(self) -> None:
        """The index has a clock of its own."""

    def has(self, object_id: ObjectId) -> bool:
        return self.index.has(object_id)

    def hits(self, geometry: Geometry, keys: Sequence[bytes], num_tokens: int) -> HitSource:
        return self.index

    def use(self, object_ids: Sequence[ObjectId]) -> None:
        pinned = self.index.pin(object_ids)
        assert pinned is not None, "a lookup promised what is not there"
        self.index.unpin(object_ids)

    def put(self, planned: PlannedObject) -> bool:
        if self.index.contains(planned.object_id):
            return True
        if not self.index.may_reserve(planned):
            return False
        for entry in self.index.evict(planned.num_bytes, keep=planned.parents):
            self.evicted(Held(entry.object_id, entry.num_bytes, entry.end_tokens, entry.last_use))
        self._tickets += 1
        if self.index.reserve(planned, self._tickets) is None:
            return False
        self.index.commit(self._tickets)
        self.stored(planned.object_id)
        return True

    def drop(self, object_id: ObjectId) -> None:
        self.index.drop(object_id)

    def clear(self) -> None:
        self.index.clear()


class OpenShelf:
    """Holds each object for itself, whatever it builds on: the longest unused first, of equals the deepest.

    ``refreshes``: what is stored again counts as used. All that happens between two calls of ``tick`` is one use.
    """

    def __init__(self, capacity_bytes: int | None, refreshes: bool = True) -> None:
        self.evicted: Callable[[Held], object] = _ignore
        self.stored: Callable[[ObjectId], object] = _ignore
        self._capacity_bytes = capacity_bytes
        self._refreshes = refreshes
        self._policy = LeastRecentlyUsed[ObjectId]()
        self._held: dict[ObjectId, Held] = {}
        self._used_bytes = 0
        self._clock = 0

    def tick(self) -> None:
        self._clock += 1

    def has(self, object_id: ObjectId) -> bool:
        return object_id in self._held

    def has_each(self, object_ids: Sequence[ObjectId]) -> Sequence[bool]:
        return [object_id in self._held for object_id in object_ids]

    def hits(self, geometry: Geometry, keys: Sequence[bytes], num_tokens: int) -> HitSource:
        return BatchedHits(geometry, keys, num_tokens, self)

    def use(self, object_ids: Sequence[ObjectId]) -> None:
        for object_id in object_ids:
            self._touch(self._held[object_id])

    def _touch(self, held: Held) -> None:
        held.last_use = self._clock
        self._policy.add(held.object_id, held.last_use, held.end_tokens)

    def put(self, planned: PlannedObject) -> bool:
        if (held := self._held.get(planned.object_id)) is not None:
            if self._refreshes:
                self._touch(held)
            return True
        return self.take(Held(planned.object_id, planned.num_bytes, planned.end_tokens, 0))

    def take(self, held: Held) -> bool:
        """Puts in what another shelf has let go of: it was used now."""
        if held.object_id in self._held:
            return True
        if self._capacity_bytes is not None and held.num_bytes > self._capacity_bytes:
            return False
        while self._capacity_bytes is not None and self._used_bytes + held.num_bytes > self._capacity_bytes:
            oldest = self._policy.pop()
            assert oldest is not None
            self.evicted(self._remove(oldest))
        self._held[held.object_id] = held
        self._used_bytes += held.num_bytes
        self._touch(held)
        self.stored(held.object_id)
        return True

    def drop(self, object_id: ObjectId) -> None:
        if object_id in self._held:
            self._policy.discard(object_id)
            self._remove(object_id)

    def _remove(self, object_id: ObjectId) -> Held:
        held = self._held.pop(object_id)
        self._used_bytes -= held.num_bytes
        return held

    def clear(self) -> None:
        for object_id in list(self._held):
            self.drop(object_id)


class Admission:
    """What a tier writes at all: production's ``store_on_nth_use`` and ``max_write_bytes_per_s``, and losses by chance.

    ``now``: the replay's clock, in seconds. ``lost_share``: of the requests, those that lose their stores from some
    chunk on.
    """

    def __init__(
        self,
        now: Callable[[], float],
        largest_bytes: int,
        nth_use: int = 1,
        write_bytes_per_s: int = 0,
        lost_share: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._uses = UseCounter(nth_use)
        self._rate = WriteRate(write_bytes_per_s, largest_bytes, now)
        self.is_limited = write_bytes_per_s > 0
        self._lost_share = lost_share
        self._random = random.Random(seed)

    def wants(self, object_id: ObjectId) -> bool:
        """Asked once an object and request."""
        return self._uses.is_due(object_id)

    def allows(self, num_bytes: int) -> bool:
        return self._rate.allows(num_bytes)

    def spend(self, num_bytes: int) -> None:
        self._rate.spend(num_bytes)

    def num_kept(self, num_chunks: int) -> int:
        """How many leading chunks of a request can be stored: all of them, but for a loss."""
        if not self._lost_share or self._random.random() >= self._lost_share:
            return num_chunks
        return self._random.randrange(num_chunks) if num_chunks else 0
