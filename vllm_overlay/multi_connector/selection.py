# SPDX-License-Identifier: Apache-2.0
"""Which child loads a request, and where its prefill should stop. Pure: no vLLM, no clock, no state."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm_overlay.common.fence import SHUTDOWN

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


def best_offer(offers: Sequence[int | None], worth: Worth) -> int | None:
    """The child whose offered tokens are worth most, the first of equals; None when none is worth more than 0."""
    return _best([worth(child, tokens) if tokens else 0.0 for child, tokens in enumerate(offers)])


def _best(scores: Sequence[float]) -> int | None:
    best = max(range(len(scores)), key=scores.__getitem__, default=None)
    return None if best is None or scores[best] <= 0 else best


def decide(offers: Sequence[int | None], worth: Worth, ceiling: int, may_wait: bool) -> Verdict:
    """The best offer. ``offers``: each child's tokens, None while it is still looking.

    ``ceiling`` is the largest number of tokens anyone may offer. While ``may_wait``, a child that is still looking
    postpones the decision only if its best possible answer would win.
    """
    scores = [worth(child, tokens) if tokens else 0.0 for child, tokens in enumerate(offers)]
    best = _best(scores)
    if may_wait and None in offers and _someone_could_win(offers, worth, ceiling, best, scores):
        return Verdict(None, wait=True)
    return Verdict(best)


def _someone_could_win(
    offers: Sequence[int | None], worth: Worth, ceiling: int, best: int | None, scores: Sequence[float]
) -> bool:
    to_beat = 0.0 if best is None else scores[best]
    for child, tokens in enumerate(offers):
        if tokens is None and ceiling:
            reach = worth(child, ceiling)
            if reach > to_beat or (best is not None and child < best and reach == to_beat):
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
    ``resume_tokens`` (local hit plus the chosen child's tokens) and inside the request. The largest such value of the
    children's holds. Each child starts from the scheduler's value, so one that sets nothing votes for that. If there is
    none, the scheduler's own value holds. It is the largest, because the prefix up to it is what most tiers can serve
    to the next sibling. A stop that turns out useless costs one split of a prefill, never a wrong byte.
    """
    useful = [
        value
        for value in childrens
        if isinstance(value, int) and not isinstance(value, bool) and resume_tokens < value < num_tokens
    ]
    return max(useful, default=schedulers)
