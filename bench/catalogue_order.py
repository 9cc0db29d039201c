# SPDX-License-Identifier: Apache-2.0
"""The order of a disk tier's catalogue, in memory: by last use, or by the times that one engine's rankings give."""

import heapq
import math
from collections.abc import Iterable, Sequence

from bench.hit_replay import Clock
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tiers.disk.bookkeeper import LATE_S
from vllm_overlay.tiers.disk.catalogue import Scored
from vllm_overlay.tiers.disk.ranking import Ranker, times_of
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.policies.base import EvictionPolicy


class CatalogueOrder(EvictionPolicy[Entry]):
    """The earliest place goes first, of equals what was stored first. Places are whole seconds, or scores.

    ``ranks``: the engine ranks as production does. Its scores do not expire here, because it is always at work.
    """

    def __init__(self, clock: Clock, capacity_bytes: int, ranks: bool) -> None:
        self._clock = clock
        self._capacity_bytes = capacity_bytes
        self._ranks = ranks
        self._ranker: Ranker | None = None
        self._last_uses: dict[Entry, float] = {}
        self._places: dict[Entry, float] = {}
        self._scored: set[Entry] = set()
        self._offered: dict[Entry, float] = {}
        self._heap: list[tuple[float, int, Entry]] = []

    def serve(self, geometry: Geometry) -> None:
        if self._ranks:
            self._ranker = Ranker(geometry, self._capacity_bytes, clock=self._clock)

    def stored(self, items: Sequence[Entry]) -> None:
        for item in items:
            self._last_uses[item] = self._places[item] = self._now()
        if self._ranker is not None:
            self._ranker.policy.stored(items)
            self._ranker.stored(sum(item.num_bytes for item in items))

    def used(self, items: Sequence[Entry]) -> None:
        for item in items:
            self._last_uses[item] = self._places[item] = self._now()
        if self._ranker is not None:
            self._ranker.policy.used(items)

    def removed(self, items: Sequence[Entry]) -> None:
        for item in items:
            place = self._places.pop(item)
            del self._last_uses[item]
            if item in self._scored:
                self._scored.remove(item)
                for parent in item.parents:
                    if list(parent.children) == [item] and parent not in self._scored:
                        self._score(parent, place)
        if self._ranker is not None:
            self._ranker.policy.removed(items)

    def add(self, item: Entry, last_use: int, end_tokens: int) -> None:
        self._push(item)
        if self._ranker is not None:
            self._ranker.policy.add(item, last_use, end_tokens)

    def discard(self, item: Entry) -> None:
        self._offered.pop(item, None)
        if self._ranker is not None:
            self._ranker.policy.discard(item)

    def pop(self) -> Entry | None:
        self.rank_if_due()
        while self._heap:
            place, _, item = heapq.heappop(self._heap)
            if self._offered.get(item) == place:
                self.discard(item)
                return item
        return None

    def _now(self) -> float:
        return float(int(self._clock()))

    def _push(self, item: Entry) -> None:
        self._offered[item] = self._places[item]
        heapq.heappush(self._heap, (self._places[item], item.ticket, item))

    def _score(self, item: Entry, place: float) -> None:
        self._places[item] = place
        self._scored.add(item)
        if item in self._offered:
            self._push(item)

    def rank_if_due(self) -> None:
        """Called before each eviction."""
        if self._ranker is not None and (ranking := self._ranker.advance(math.inf)) is not None:
            self.publish(times_of(ranking, to_epoch_s=0.0))

    def publish(self, scores: Iterable[Scored]) -> None:
        """Scores by name, as the bookkeeper gives them to the catalogue."""
        entries = {item.object_id: item for item in self._places}
        for scored in scores:
            item = entries[scored.object_id]
            if self._last_uses[item] <= scored.until + LATE_S:
                self._score(item, scored.score)
