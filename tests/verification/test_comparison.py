# SPDX-License-Identifier: Apache-2.0
"""What counts as equal, near and different."""

import math

import pytest

from vllm_overlay.server.api_client import Completion
from vllm_overlay.verification.comparison import Verdict, compare

TOLERANCE = 0.05


def answer(tokens: list[int], logprobs: list[float], cached: int = 64, **others: float) -> Completion:
    """``others``: at the last place, ``t7=-1.0`` is the logprob of token 7."""
    candidates = [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)]
    candidates[-1] |= {int(name.removeprefix("t")): logprob for name, logprob in others.items()}
    return Completion(tokens, logprobs, 100, cached, 0.0, candidates)


COMPUTED = answer([1, 2, 3], [-1.0, -1.0, -1.0], cached=0, t7=-1.02)


@pytest.mark.parametrize(
    ("restored", "verdict", "detail"),
    [
        (answer([1, 2, 3], [-1.0, -1.0, -1.0]), Verdict.EQUAL, ""),
        (answer([1, 2, 3], [-1.0, -1.04, -1.0]), Verdict.NEAR, ""),
        (answer([1, 2, 3], [-1.0, -1.2, -1.0]), Verdict.DIFFERENT, "token 2 has logprob -1.2000 and not -1.0000"),
        (answer([1, 2, 3], [-1.0, math.nan, -1.0]), Verdict.DIFFERENT, "token 2 has logprob nan and not -1.0000"),
        (answer([1, 2, 7], [-1.0, -1.0, -1.0], t3=-1.01), Verdict.NEAR, ""),  # a tie decided otherwise
        (answer([1, 2, 7], [-1.0, -1.0, -0.5], t3=-2.0), Verdict.DIFFERENT, "token 3 is 7 and not 3"),
        (answer([1, 2, 8], [-1.0, -1.0, -1.0], t3=-1.0), Verdict.DIFFERENT, "token 3 is 8 and not 3"),
    ],
    ids=["equal", "near", "a logprob", "NaN", "a tie", "no tie", "a token that was not likely"],
)
def test_an_answer_is_compared_token_by_token(restored: Completion, verdict: Verdict, detail: str) -> None:
    comparison = compare(restored, COMPUTED, None, TOLERANCE)
    assert (comparison.verdict, comparison.detail) == (verdict, detail)


def test_no_tolerance_means_equal_bits() -> None:
    assert compare(answer([1, 2, 3], [-1.0, -1.0, -1.0001]), COMPUTED, None, 0.0).verdict is Verdict.DIFFERENT
    assert compare(answer([1, 2, 3], [-1.0, -1.0, -1.0]), COMPUTED, None, 0.0).verdict is Verdict.EQUAL


def test_what_the_device_cache_gives_at_the_same_place_is_right_too() -> None:
    restored = answer([1, 2, 9], [-1.0, -1.3, -0.5])
    comparison = compare(restored, COMPUTED, restored, TOLERANCE)
    assert comparison.verdict is Verdict.AS_DEVICE
    assert comparison.difference == pytest.approx(0.3)


def test_a_device_hit_of_another_length_excuses_nothing() -> None:
    restored = answer([1, 2, 9], [-1.0, -1.3, -0.5])
    elsewhere = answer([1, 2, 9], [-1.0, -1.3, -0.5], cached=128)
    assert compare(restored, COMPUTED, elsewhere, TOLERANCE).verdict is Verdict.DIFFERENT
