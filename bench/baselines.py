# SPDX-License-Identifier: Apache-2.0
"""Published orders of eviction, over the production index: they choose among the objects that may go.

Ghosts are names of objects that went. Times are the trace's seconds.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.future import Future
from bench.hit_replay import Clock
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed


@dataclass(slots=True)
class Moment:
    """Where the replay stands."""

    clock: Clock
    capacity_bytes: int
    future: Future
    place: int = 0


class KnowsTheFuture(EvictionPolicy[Entry]):
    """What is used last from now on goes first: Belady's rule, over the objects that may go."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._heap: list[tuple[float, int, int, Entry]] = []
        self._offered: dict[Entry, int] = {}
        self._sequence = 0

    def add(self, item: Entry, last_use: int, end_tokens: int) -> None:
        moment = self._moment
        self._sequence += 1
        self._offered[item] = self._sequence
        next_use = moment.future.next_use(item.object_id.key, item.object_id.is_snapshot, moment.place)
        heapq.heappush(self._heap, (-next_use, -item.end_tokens, self._sequence, item))

    def discard(self, item: Entry) -> None:
        self._offered.pop(item, None)

    def pop(self) -> Entry | None:
        while self._heap:
            rank, _, sequence, item = heapq.heappop(self._heap)
            if self._offered.get(item) != sequence:
                continue
            if -rank <= self._moment.place:  # that use is over
                self.add(item, 0, item.end_tokens)
                continue
            del self._offered[item]
            return item
        return None

    def __contains__(self, item: object) -> bool:
        return item in self._offered

    def __len__(self) -> int:
        return len(self._offered)


@dataclass(slots=True)
class _Queue:
    """A list of entries with its offered ones in order of last use, and the names of those that went."""

    policy: LeastRecentlyUsed[Entry] = field(default_factory=LeastRecentlyUsed)
    num_bytes: int = 0
    ghosts: "OrderedDict[ObjectId, int]" = field(default_factory=OrderedDict)
    ghost_bytes: int = 0

    def remember(self, item: Entry, limit_bytes: float) -> None:
        self.ghosts[item.object_id] = item.num_bytes
        self.ghost_bytes += item.num_bytes
        while self.ghost_bytes > limit_bytes:
            _, num_bytes = self.ghosts.popitem(last=False)
            self.ghost_bytes -= num_bytes

    def forget(self, object_id: ObjectId) -> int:
        num_bytes = self.ghosts.pop(object_id, 0)
        self.ghost_bytes -= num_bytes
        return num_bytes


class _TwoQueues(EvictionPolicy[Entry]):
    """Entries in two queues, each of which knows what it may give up."""

    def __init__(self, moment: Moment) -> None:
        self._capacity_bytes = moment.capacity_bytes
        self._first, self._second = _Queue(), _Queue()
        self._is_in_second: dict[Entry, bool] = {}

    def _queue(self, item: Entry) -> _Queue:
        return self._second if self._is_in_second[item] else self._first

    def _put(self, item: Entry, in_second: bool) -> None:
        self._is_in_second[item] = in_second
        self._queue(item).num_bytes += item.num_bytes

    def _take(self, item: Entry) -> _Queue:
        queue = self._queue(item)
        queue.num_bytes -= item.num_bytes
        del self._is_in_second[item]
        return queue

    def add(self, item: Entry, last_use: int, end_tokens: int) -> None:
        self._queue(item).policy.add(item, last_use, end_tokens)

    def discard(self, item: Entry) -> None:
        if item in self._is_in_second:
            self._queue(item).policy.discard(item)

    def __contains__(self, item: object) -> bool:
        return item in self._first.policy or item in self._second.policy

    def __len__(self) -> int:
        return len(self._first.policy) + len(self._second.policy)


class Arc(_TwoQueues):
    """ARC by name and in bytes: seen once and seen twice, whose shares follow the hits among the ghosts of each."""

    def __init__(self, moment: Moment) -> None:
        super().__init__(moment)
        self._target = 0.0

    def stored(self, items: Sequence[Entry]) -> None:
        for item in items:
            self._stored(item)

    def _stored(self, item: Entry) -> None:
        first, second = self._first, self._second
        was_first, was_second = item.object_id in first.ghosts, item.object_id in second.ghosts
        if was_first:
            ratio = max(1.0, second.ghost_bytes / max(1, first.ghost_bytes))
            self._target = min(float(self._capacity_bytes), self._target + ratio * first.forget(item.object_id))
        if was_second:
            ratio = max(1.0, first.ghost_bytes / max(1, second.ghost_bytes))
            self._target = max(0.0, self._target - ratio * second.forget(item.object_id))
        self._put(item, was_first or was_second)

    def used(self, items: Sequence[Entry]) -> None:
        for item in items:
            if not self._is_in_second[item]:
                self.discard(item)
                self._take(item)
                self._put(item, True)

    def removed(self, items: Sequence[Entry]) -> None:
        for item in items:
            queue = self._take(item)
            limit = self._capacity_bytes - queue.num_bytes if queue is self._first else self._capacity_bytes
            queue.remember(item, max(limit, 0))

    def pop(self) -> Entry | None:
        order = [self._first, self._second]
        if self._first.num_bytes <= self._target:
            order.reverse()
        return order[0].policy.pop() or order[1].policy.pop()


class S3Fifo(_TwoQueues):
    """S3-FIFO, in bytes. New objects get a tenth. What was used there, or comes back, stays longer."""

    SMALL_SHARE, MOST_USES = 0.1, 3

    def __init__(self, moment: Moment) -> None:
        super().__init__(moment)
        self._uses: dict[Entry, int] = {}
        self._order: dict[Entry, int] = {}
        self._sequence = 0

    def stored(self, items: Sequence[Entry]) -> None:
        for item in items:
            self._uses[item] = 0
            self._enqueue(item, bool(self._first.forget(item.object_id)))

    def _enqueue(self, item: Entry, in_second: bool) -> None:
        self._sequence += 1
        self._order[item] = self._sequence
        self._put(item, in_second)

    def used(self, items: Sequence[Entry]) -> None:
        for item in items:
            self._uses[item] = min(self._uses[item] + 1, self.MOST_USES)

    def removed(self, items: Sequence[Entry]) -> None:
        for item in items:
            del self._uses[item], self._order[item]
            if self._take(item) is self._first:
                self._first.remember(item, self._capacity_bytes)

    def add(self, item: Entry, last_use: int, end_tokens: int) -> None:
        self._queue(item).policy.add(item, self._order[item], end_tokens)

    def pop(self) -> Entry | None:
        while len(self):
            is_small = self._first.num_bytes > self.SMALL_SHARE * self._capacity_bytes and len(self._first.policy)
            queue = self._first if is_small or not len(self._second.policy) else self._second
            item = queue.policy.pop()
            assert item is not None
            if queue is self._first:
                if self._uses[item] < 1:
                    return item
                self._uses[item] = 0
            elif not self._uses[item]:
                return item
            else:
                self._uses[item] -= 1
            self._take(item)
            self._enqueue(item, True)
            self.add(item, 0, item.end_tokens)
        return None


BASELINES: dict[str, Callable[[Moment], EvictionPolicy[Entry]]] = {
    "lru": lambda _: LeastRecentlyUsed[Entry](),
    "arc": Arc,
    "s3-fifo": S3Fifo,
    "future": KnowsTheFuture,
}
