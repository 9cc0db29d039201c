# SPDX-License-Identifier: Apache-2.0
"""The rule ``weighted``: the most tokens x load_weight.

A number is the operator's. ``"auto"`` is measured:

    load_weight = 1 - load_seconds(tokens) / (compute_seconds(tokens) x num_delayed)

So tokens x load_weight is the time that the load saves, in tokens' worth of computing. A load delays its own request.
Computing delays also the requests behind it. With q of them waiting these are, itself included, 1 + q x (1 + q): those
q, and each that comes before the queue is empty. In an M/M/1 queue of utilisation r that is q / (1 - r), and
q = r / (1 - r), so 1 / (1 - r) = 1 + q.
"""

from collections.abc import Collection, Sequence

from vllm_overlay.multi_connector.exploration import Exploration
from vllm_overlay.multi_connector.load_times import LoadTimes
from vllm_overlay.multi_connector.load_weight import LoadWeight
from vllm_overlay.multi_connector.prefill_rate import PrefillRate
from vllm_overlay.multi_connector.selection import best_offer
from vllm_overlay.multi_connector.selection_rules.base import SelectionRule


class Weighted(SelectionRule):
    """Also what holds after another rule has failed."""

    def __init__(self, load_weights: Sequence[LoadWeight]) -> None:
        self._weights = [weight.number for weight in load_weights]
        self._measured = {i: LoadTimes(weight.number) for i, weight in enumerate(load_weights) if weight.is_measured}
        self._prefill = PrefillRate()
        self._exploration = Exploration(len(load_weights))
        self._num_delayed = 1

    def worth(self, child: int, tokens: int) -> float:
        compute_s = self._prefill.seconds_per_token
        if compute_s is None or child not in self._measured:
            return tokens * self._weights[child]
        return tokens - self._measured[child].seconds(tokens, compute_s) / (compute_s * self._num_delayed)

    def try_instead(self, offers: Sequence[int], best: int | None) -> int | None:
        if self._prefill.seconds_per_token is None:
            return None
        to_beat = 0.0 if best is None else self.worth(best, offers[best])
        others = (
            child for child, times in self._measured.items() if times.is_stale and offers[child] and child != best
        )
        longer = ((child, to_beat - self.worth(child, offers[child])) for child in others)
        return next((child for child, tokens in longer if self._exploration.may_try(child, tokens)), None)

    def decided(self, offers: Sequence[int], asked_tokens: int, loader: int | None) -> None:
        best = best_offer(offers, self.worth)
        saved = 0.0 if best is None else self.worth(best, offers[best])
        for child, load_times in self._measured.items():
            if child == loader:
                self._exploration.loads(child)
            elif offers[child] and child != best:
                self._exploration.lost(child, asked_tokens - saved)
                load_times.lost()

    def about_to_decide(self, num_waiting: int, loads: Collection[tuple[int, int, float]]) -> None:
        self._num_delayed = 1 + num_waiting * (1 + num_waiting)
        for child, load_times in self._measured.items():
            load_times.under_way((tokens, seconds) for own, tokens, seconds in loads if own == child)

    def load_ended(self, child: int, tokens: int, seconds: float, failed: bool) -> None:
        if child not in self._measured:
            return
        compute_s = self._prefill.seconds_per_token
        # What has failed is computed after all.
        wasted = tokens * (compute_s or 0.0) if failed else 0.0
        self._measured[child].ended(tokens, seconds + wasted, compute_s)

    def step_ended(self, tokens: int, seconds: float) -> None:
        self._prefill.step_ended(tokens, seconds)
