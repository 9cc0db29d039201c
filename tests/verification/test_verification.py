# SPDX-License-Identifier: Apache-2.0
"""A verification of a server that is played here; tests/http/test_verify.py has real ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from vllm_overlay.server.api_client import ApiClient, ApiError, Completion, Metrics
from vllm_overlay.verification.comparison import Verdict, is_passed
from vllm_overlay.verification.verification import compute, restore

UNIT = 64
GAUGES = {"restore_unit": UNIT, "chunk": 2 * UNIT, "block": 4 * UNIT}


class TwoEngines:
    """Of data parallelism: each restores what it has stored itself, and requests go to them in turn, as vLLM sends
    them where nobody else asks."""

    def __init__(self) -> None:
        self._stored: tuple[set[Any], set[Any]] = set(), set()
        self._next = 0
        self.num_left = 0

    def max_model_len(self) -> int:
        return 8192

    def tokenize(self, text: str) -> list[int]:
        return list(range(50))

    def complete(
        self, prompt: Sequence[int], max_tokens: int, *, cache_salt: str, engine: int | None = None, **options: Any
    ) -> Completion:
        if engine is None:
            engine, self._next = self._next, 1 - self._next
        ends = range(UNIT, len(prompt), UNIT)
        beginnings = [(cache_salt, tuple(prompt[:end])) for end in ends]
        found = sum(beginning in self._stored[engine] for beginning in beginnings)
        self._stored[engine].update(beginnings)
        return Completion([7] * max_tokens, [-0.5] * max_tokens, len(prompt), found * UNIT, 0.0)

    def reset_prefix_cache(self) -> None:
        """What is stored stays."""

    def settled_metrics(self) -> Metrics:
        engines = [f'{{connector="cpu",engine="{engine}"}}' for engine in (0, 1)]
        lines = [f"vllm:hybrid_offload_{name}_tokens{of} {tokens}" for name, tokens in GAUGES.items() for of in engines]
        return Metrics(
            "\n".join([*lines, f'vllm:kv_connector_too_slow_total{{connector="cpu"}} {self.num_left}']) + "\n"
        )

    wait_for_stores = settled_metrics


class Hurried(TwoEngines):
    """Once its device cache is emptied, it computes a prompt of up to so many tokens rather than load it."""

    def __init__(self, longest_left: int) -> None:
        super().__init__()
        self._longest_left, self._num_resets = longest_left, 0

    def reset_prefix_cache(self) -> None:
        self._num_resets += 1

    def complete(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> Completion:
        answer = super().complete(prompt, max_tokens, **options)
        if self._num_resets < 2 or len(prompt) > self._longest_left:
            return answer
        self.num_left += 1
        return replace(answer, num_cached_tokens=0)


@pytest.mark.parametrize(("longest_left", "num_left", "passes"), [(2 * UNIT, 1, True), (1000, 7, False)])
def test_what_is_left_because_computing_is_faster_does_not_fail_unless_all_is(
    longest_left: int, num_left: int, passes: bool
) -> None:
    api = cast(ApiClient, Hurried(longest_left))
    results = restore(api, compute(api, 500, seed=0, say=lambda _: None), tolerance=0, say=lambda _: None)
    verdicts = [result.comparison.verdict for result in results]
    assert verdicts == [Verdict.LEFT] * num_left + [Verdict.EQUAL] * (len(verdicts) - num_left)
    assert is_passed(verdicts) == passes
    assert not is_passed([*verdicts, Verdict.NOT_RESTORED]) and not is_passed([*verdicts, Verdict.DIFFERENT])


class Serving(TwoEngines):
    """Its device cache cannot be emptied."""

    def reset_prefix_cache(self) -> None:
        raise ApiError("/reset_prefix_cache answered 404")


def test_a_server_whose_device_cache_cannot_be_emptied_is_asked_for_nothing() -> None:
    said: list[str] = []
    with pytest.raises(ApiError, match="404"):
        compute(cast(ApiClient, Serving()), 1000, seed=0, say=said.append)
    assert not said


def test_one_engine_of_several_is_asked_for_all_of_it_at_its_own_restore_points() -> None:
    api = cast(ApiClient, TwoEngines())
    computed = compute(api, 1000, seed=0, say=lambda _: None)
    assert [answers.prompt.boundary for answers in computed.answers][:3] == [UNIT, 2 * UNIT, 3 * UNIT]
    results = restore(api, computed, tolerance=0, say=lambda _: None)
    assert {result.comparison.verdict for result in results} == {Verdict.EQUAL}
