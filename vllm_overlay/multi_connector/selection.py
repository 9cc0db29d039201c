# SPDX-License-Identifier: Apache-2.0
"""Which child loads a request, and where its prefill should stop. Pure: no vLLM, no clock, no state."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_overlay.common.fence import SHUTDOWN


@dataclass(slots=True, frozen=True)
class Offer:
    """One child's answer to a lookup. ``tokens`` is None while the child is still looking."""

    tokens: int | None
    weight: float
    value: Callable[[int], float] | None = None
    """What a number of tokens from this child is worth; None: tokens x weight. 0 or less is never loaded.

    It must not fall and then rise, so that the largest possible answer is also the best one or none is any good.
    """

    def worth(self, tokens: int) -> float:
        return tokens * self.weight if self.value is None else self.value(tokens)

    def score(self) -> float:
        return self.worth(self.tokens) if self.tokens else 0.0

    def could_reach(self, ceiling: int) -> float:
        """The best score this offer can still become."""
        return self.worth(ceiling) if self.tokens is None else self.score()


@dataclass(slots=True, frozen=True)
class Verdict:
    """``chosen`` is an index into the offers, or None when no child loads; ``wait`` asks for another lookup later."""

    chosen: int | None
    wait: bool = False


def decide(offers: Sequence[Offer], ceiling: int, may_wait: bool) -> Verdict:
    """The offer with the highest score, the first of equals; an offer that scores 0 or less never loads.

    ``ceiling`` is the largest number of tokens anyone may offer. While ``may_wait``, a child that is still looking
    postpones the decision only if its best possible answer would win.
    """
    best = max(range(len(offers)), key=lambda i: offers[i].score(), default=None)
    if best is not None and offers[best].score() <= 0:
        best = None
    if may_wait and _someone_could_win(offers, best, ceiling):
        return Verdict(None, wait=True)
    return Verdict(best)


def _someone_could_win(offers: Sequence[Offer], best: int | None, ceiling: int) -> bool:
    to_beat = 0.0 if best is None else offers[best].score()
    for i, offer in enumerate(offers):
        if offer.tokens is None:
            reach = offer.could_reach(ceiling)
            if reach > to_beat or (best is not None and i < best and reach == to_beat):
                return True
    return False


def valid_tokens(answer: object, ceiling: int) -> int | None:
    """``answer`` as a number of tokens between 0 and ``ceiling``, or None when it is not one.

    A too large answer is not cut down to the ceiling: a child that keeps recurrent states has one at the boundary it
    named, not at the one it would be cut down to.
    """
    if isinstance(answer, bool):
        return None
    try:
        tokens = int(operator.index(answer))  # type: ignore[arg-type]
    except SHUTDOWN:
        raise
    except BaseException:  # no number, or a foreign one that raises: a tensor of several, say
        return None
    return tokens if 0 <= tokens <= ceiling else None


def merge_junctions(schedulers: int, childrens: Iterable[object], resume_tokens: int, num_tokens: int) -> int:
    """The one junction the scheduler stops at, of the values the children left in ``shared_prefix_boundary``.

    A junction is where a prefill should stop so that the state there is kept for siblings. It can only help ahead of
    ``resume_tokens`` (local hit plus the chosen child's tokens) and inside the request, so: the largest such value
    among the children's (each started from the scheduler's, so one that set nothing votes for that), else the
    scheduler's own. The largest, because the prefix up to it is what most tiers can serve to the next sibling; a stop
    that turns out useless costs one split of a prefill, never a wrong byte.
    """
    useful = [
        value
        for value in childrens
        if isinstance(value, int) and not isinstance(value, bool) and resume_tokens < value < num_tokens
    ]
    return max(useful, default=schedulers)
