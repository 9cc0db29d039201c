# SPDX-License-Identifier: Apache-2.0
"""A service under load: one prefill at a time, first come first served, and each tier loads one request at a time.

While a request loads, those behind it are computed. As in vLLM, who loads is decided when a request's turn comes.
"""

import heapq
from collections.abc import Sequence
from enum import IntEnum

from bench.services import Arrival, Service
from vllm_overlay.multi_connector.load_weight import LoadWeight
from vllm_overlay.multi_connector.selection_rules.guarded import GuardedRule
from vllm_overlay.multi_connector.selection_rules.weighted import Weighted


class _Event(IntEnum):
    ARRIVED = 0
    LOADED = 1
    COMPUTED = 2


class Queue:
    """One run."""

    def __init__(
        self,
        service: Service,
        arrivals: Sequence[Arrival],
        slower: float,
        weights: list[LoadWeight],
        tells_of_waiting: bool = True,
    ) -> None:
        """``slower``: arrivals come so many times later than they say.

        ``tells_of_waiting``: whether the rule is told how many requests wait.
        """
        self._tells_of_waiting = tells_of_waiting
        self._service, self._arrivals, self._slower = service, arrivals, slower
        self._rule = GuardedRule("weighted", Weighted(weights), weights)
        self._events = [(one.at * slower, _Event.ARRIVED, number, 0) for number, one in enumerate(arrivals)]
        self._undecided: list[int] = []
        self._loaded: list[tuple[int, int]] = []
        """(request, tokens left to compute), like ``_undecided`` a heap."""
        self._loads: dict[int, tuple[int, float]] = {}
        """Request -> (tier, start)."""
        self._tier_is_free_at = [0.0] * len(weights)
        self._is_computing = False

    def first_token_seconds(self) -> list[float]:
        """Each request's, from its arrival."""
        found = []
        while self._events:
            now, event, number, tokens = heapq.heappop(self._events)
            if event is _Event.ARRIVED:
                heapq.heappush(self._undecided, number)
            elif event is _Event.LOADED:
                self._load_ended(number, tokens, now)
            else:
                self._is_computing = False
                self._rule.step_ended(tokens, tokens * self._service.compute_s)
                found.append(now - self._arrivals[number].at * self._slower)
            while not self._is_computing and (self._undecided or self._loaded):
                self._take_next(now)
        return found

    def _load_ended(self, number: int, tokens: int, now: float) -> None:
        tier, started = self._loads.pop(number)
        self._rule.load_ended(tier, tokens, now - started, failed=False)
        heapq.heappush(self._loaded, (number, self._arrivals[number].prompt - tokens))

    def _take_next(self, now: float) -> None:
        """Of the request that came first: computes what is left, or decides who loads."""
        if self._loaded and (not self._undecided or self._loaded[0][0] < self._undecided[0]):
            self._compute(*heapq.heappop(self._loaded), now)
            return
        number = heapq.heappop(self._undecided)
        arrival = self._arrivals[number]
        under_way = [
            (tier, self._arrivals[other].offers[tier], now - started) for other, (tier, started) in self._loads.items()
        ]
        self._rule.about_to_decide(len(self._undecided) * self._tells_of_waiting, under_way)
        loader = self._rule.decide(arrival.offers, arrival.prompt, may_wait=False).chosen
        self._rule.decided(arrival.offers, arrival.prompt, loader)
        if loader is None:
            self._compute(number, arrival.prompt, now)
            return
        self._loads[number] = loader, now
        ends = max(now, self._tier_is_free_at[loader]) + arrival.loads[loader]
        self._tier_is_free_at[loader] = ends
        heapq.heappush(self._events, (ends, _Event.LOADED, number, arrival.offers[loader]))

    def _compute(self, number: int, tokens: int, now: float) -> None:
        self._is_computing = True
        heapq.heappush(self._events, (now + tokens * self._service.compute_s, _Event.COMPUTED, number, tokens))
