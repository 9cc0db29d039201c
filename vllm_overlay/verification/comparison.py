# SPDX-License-Identifier: Apache-2.0
"""How a restored answer compares with the recomputed one."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from vllm_overlay.server.api_client import Completion


class Verdict(StrEnum):
    """Ordered from good to bad. The last two fail a verification."""

    EQUAL = "equal"
    """All tokens and logprobs are those of the recomputed answer, to the last bit."""
    AS_DEVICE = "equal to a hit in vLLM's device cache"
    """Not those of the recomputed answer, but those that vLLM's own cache gives with as many cached tokens."""
    NEAR = "within the tolerance"
    """Logprobs are near, and where a token differs both were nearly as likely."""
    LEFT = "not worth a load"
    """``load_weight: "auto"`` expected computing to be faster. It says nothing of what a restore gives."""
    NOT_RESTORED = "not restored"
    DIFFERENT = "DIFFERENT"


def is_passed(verdicts: Iterable[Verdict]) -> bool:
    """Whether something was restored, and all of that right."""
    found = set(verdicts) - {Verdict.LEFT}
    return bool(found) and found.isdisjoint({Verdict.NOT_RESTORED, Verdict.DIFFERENT})


@dataclass(frozen=True, slots=True)
class Comparison:
    """``difference`` is in logprobs, the largest up to the first token that differs; ``detail`` says what differs."""

    verdict: Verdict
    difference: float = 0.0
    detail: str = ""


def compare(answer: Completion, recomputed: Completion, by_device: Completion | None, tolerance: float) -> Comparison:
    """``by_device`` counts only if it had as many cached tokens as ``answer``. ``tolerance`` is in logprobs."""
    if answer.same_as(recomputed):
        return Comparison(Verdict.EQUAL)
    difference, detail = _difference(answer, recomputed, tolerance)
    is_comparable = by_device is not None and by_device.num_cached_tokens == answer.num_cached_tokens
    if is_comparable and by_device is not None and answer.same_as(by_device):
        return Comparison(Verdict.AS_DEVICE, difference)
    return Comparison(Verdict.DIFFERENT if detail else Verdict.NEAR, difference, detail)


def _difference(answer: Completion, recomputed: Completion, tolerance: float) -> tuple[float, str]:
    """The largest difference of logprobs, and words for the first one above ``tolerance`` (NaN is above all)."""
    largest = 0.0
    pairs = zip(answer.token_ids, recomputed.token_ids, answer.logprobs, recomputed.logprobs, strict=True)
    for place, (mine, theirs, my_logprob, their_logprob) in enumerate(pairs, 1):
        if mine == theirs:
            apart = abs(my_logprob - their_logprob)
            words = f"token {place} has logprob {my_logprob:.4f} and not {their_logprob:.4f}"
        else:
            apart = max(_apart(token, answer, recomputed, place - 1) for token in (mine, theirs))
            words = f"token {place} is {mine} and not {theirs}"
        largest = max(largest, apart if apart == apart else math.inf)
        if not apart <= tolerance:
            return largest, words
        if mine != theirs:
            break  # a tie, decided otherwise: what follows has another beginning
    return largest, ""


def _apart(token: int, answer: Completion, recomputed: Completion, place: int) -> float:
    """How far apart both say that one token's logprob is. Infinite if one does not name the token."""
    mine, theirs = (
        completion.candidates[place].get(token) if place < len(completion.candidates) else None
        for completion in (answer, recomputed)
    )
    return abs(mine - theirs) if mine is not None and theirs is not None else math.inf
