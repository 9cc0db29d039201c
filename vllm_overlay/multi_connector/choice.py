# SPDX-License-Identifier: Apache-2.0
"""How the MultiConnector picks: the child with the most tokens x load_weight loads a request. Pure: no vLLM, no clock.

A ``load_weight`` is the operator's number, or ``"auto"``, which is measured:

    load_weight = 1 - load_seconds(tokens) / (compute_seconds(tokens) x num_delayed)

So tokens x load_weight is the time that the load saves, in tokens' worth of computing. A load delays its own request.
Computing delays also the requests behind it. With q of them waiting these are, itself included, 1 + q x (1 + q): those
q, and each that comes before the queue is empty. In an M/M/1 queue of utilisation r that is q / (1 - r), and
q = r / (1 - r), so 1 / (1 - r) = 1 + q.

Only a load can show how fast a child is. So a measured child that always loses gets credit with each request that it
could have loaded: ``SHARE`` of the time that the request takes as decided. Once the credit covers what its load is
expected to take longer, it loads. So trying costs at most ``SHARE`` of the time, however slow the child is.

A request that loads takes one more step. So an offer of a measured child that spares less computing than one step takes
is worth that step less, which is never anything.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from vllm_overlay.multi_connector.weights import LoadTimes, LoadWeight, PrefillRate

SHARE = 0.01
Worth = Callable[[int, int], float]
"""What a child's tokens are worth, by the child's index; 0 or less is never loaded.

It must not fall and then rise with the tokens, so that the largest possible answer is also the best one or none is any
good.
"""


@dataclass(slots=True, frozen=True)
class Verdict:
    """``chosen`` is a child's index, or None when no child loads; ``wait`` asks for another lookup later.

    ``is_trial``: another offer was worth more, and this one is loaded to be measured.
    """

    chosen: int | None
    wait: bool = False
    is_trial: bool = False


class Choice:
    """One a MultiConnector, in the scheduler's process and thread. Children are named by their index."""

    def __init__(self, load_weights: Sequence[LoadWeight]) -> None:
        """``load_weights``: each child's setting."""
        self._weights = [weight.number for weight in load_weights]
        self._measured = {i: LoadTimes(weight.number) for i, weight in enumerate(load_weights) if weight.is_measured}
        self.prefill = PrefillRate()
        self._credits = dict.fromkeys(self._measured, 0.0)
        """In tokens' worth of computing."""
        self._num_delayed = 1
        self._step_s = 0.0

    def worth(self, child: int, tokens: int) -> float:
        """What loading ``tokens`` > 0 from ``child`` is worth, in tokens' worth of computing."""
        compute_s = self.prefill.seconds_per_token
        if compute_s is None or child not in self._measured:
            return tokens * self._weights[child]
        worth = tokens - self._measured[child].seconds(tokens, compute_s) / (compute_s * self._num_delayed)
        return worth if tokens * compute_s >= self._step_s else worth - self._step_s / compute_s

    def spared_s(self, child: int, tokens: int) -> float:
        """The seconds of computing that loading ``tokens`` > 0 from ``child`` spares; infinite until these are
        measured."""
        compute_s = self.prefill.seconds_per_token
        return math.inf if compute_s is None else self.worth(child, tokens) * compute_s

    def decide(self, offers: Sequence[int | None], ceiling: int) -> Verdict:
        """As the function below, or a child that is tried instead."""
        verdict = decide(offers, self.worth, ceiling)
        if verdict.wait or self.prefill.seconds_per_token is None:
            return verdict
        best = verdict.chosen
        to_beat = 0.0 if best is None else self.worth(best, offers[best] or 0)
        for child, times in self._measured.items():
            tokens = offers[child]
            if not tokens or child == best or not times.is_stale:
                continue
            if self._credits[child] >= to_beat - self.worth(child, tokens):
                return Verdict(child, is_trial=True)
        return verdict

    def decided(self, offers: Sequence[int], asked_tokens: int, loader: int | None) -> None:
        """A request is admitted. ``loader`` loads it, or with None it is computed.

        ``asked_tokens``: what the request needs beyond the device cache.
        """
        best = best_offer(offers, self.worth)
        saved = 0.0 if best is None else self.worth(best, offers[best])
        for child, load_times in self._measured.items():
            if child == loader:
                self._credits[child] = 0.0
            elif offers[child] and child != best:
                self._credits[child] += SHARE * max(asked_tokens - saved, 0.0)
                load_times.lost()

    def about_to_decide(self, num_waiting: int, loads: Collection[tuple[int, int, float]], step_s: float = 0.0) -> None:
        """Before each decision. ``num_waiting``: requests that wait to be admitted behind this one.

        ``loads``: the asynchronous loads that have not ended, (child, tokens, seconds so far). ``step_s``: what one
        more step takes.
        """
        self._step_s = step_s
        self._num_delayed = 1 + num_waiting * (1 + num_waiting)
        for child, load_times in self._measured.items():
            load_times.under_way((tokens, seconds) for own, tokens, seconds in loads if own == child)

    def load_ended(self, child: int, tokens: int, seconds: float, failed: bool) -> None:
        """An asynchronous load has ended, ``seconds`` after its blocks were allocated."""
        if child not in self._measured:
            return
        compute_s = self.prefill.seconds_per_token
        # What has failed is computed after all.
        wasted = tokens * (compute_s or 0.0) if failed else 0.0
        self._measured[child].ended(tokens, seconds + wasted, compute_s)


def best_offer(offers: Sequence[int | None], worth: Worth) -> int | None:
    """The child whose offered tokens are worth most, the first of equals; None when none is worth more than 0."""
    scores = {child: worth(child, tokens) for child, tokens in enumerate(offers) if tokens}
    best = max(scores, key=scores.__getitem__, default=None)
    return None if best is None or scores[best] <= 0 else best


def decide(offers: Sequence[int | None], worth: Worth, ceiling: int) -> Verdict:
    """The best offer. ``offers``: each child's tokens, None while it is still looking.

    ``ceiling`` is the largest number of tokens anyone may offer. A child that is still looking postpones the decision
    only if its best possible answer would win.
    """
    best = best_offer(offers, worth)
    if ceiling:
        to_beat = 0.0 if best is None else worth(best, offers[best] or 0)
        for child, tokens in enumerate(offers):
            reach = 0.0 if tokens is not None else worth(child, ceiling)
            if reach > to_beat or (best is not None and child < best and reach == to_beat):
                return Verdict(None, wait=True)
    return Verdict(best)
