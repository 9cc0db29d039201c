# SPDX-License-Identifier: Apache-2.0
"""From a request's arrival to its first output token, by where most of its prompt came from."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_overlay.connector.first_tokens import FirstTokens
from vllm_overlay.tally import Tally


class Clock:
    """Wall-clock seconds, and what is measured with them."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.tally = Tally()
        self.first_tokens = FirstTokens(self.tally, lambda: self.now)

    def request(self, name: str = "r", num_prompt_tokens: int = 100) -> Any:
        return SimpleNamespace(
            request_id=name, num_prompt_tokens=num_prompt_tokens, num_computed_tokens=0, num_output_tokens=0,
            arrival_time=self.now,
        )  # fmt: skip

    def begin(self, request: Any, num_local: int = 0, num_found: int = 0) -> None:
        """It is looked up, and the first step computes it from ``num_found`` on."""
        self.first_tokens.looked_up(request, num_local)
        request.num_computed_tokens = num_found
        self.first_tokens.step([request.request_id])

    @property
    def tracked(self) -> dict[str, Any]:
        """What it still remembers of requests."""
        return {**self.first_tokens._new, **self.first_tokens._computing}

    def seen(self) -> dict[str, tuple[int, float]]:
        """Source -> number and sum."""
        found = self.tally.histograms.items()
        return {key.partition(":")[2]: (part.count, part.sum) for key, part in found}


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_first_token_is_seen_at_the_next_step_and_counts_once(clock: Clock) -> None:
    request = clock.request()
    clock.begin(request)
    clock.now += 2.0
    clock.first_tokens.step(["r"])  # its prefill goes on
    assert clock.seen() == {}
    request.num_output_tokens = 1
    clock.now += 1.0
    for _ in range(3):
        clock.first_tokens.step(["r"])
    clock.first_tokens.finished("r")
    assert clock.seen() == {"computed": (1, 3.0)}
    assert not clock.tracked


@pytest.mark.parametrize(
    ("seconds", "preempted", "steps"),
    [(1.0, False, 0), (1.0, True, 1), (-60.0, False, 1)],
    ids=["over after one token", "preempted after it", "a clock that goes back"],
)
def test_the_first_token_is_seen_once_whatever_comes_with_it(
    clock: Clock, seconds: float, preempted: bool, steps: int
) -> None:
    request = clock.request()
    clock.begin(request)
    request.num_output_tokens, clock.now = 1, clock.now + seconds
    if preempted:
        clock.first_tokens.looked_up(request, 0)
    clock.first_tokens.step(["r"] * steps)
    clock.first_tokens.finished("r")
    assert clock.seen() == {"computed": (1, max(0.0, seconds))}


def test_a_request_that_is_aborted_before_its_first_token_is_not_counted(clock: Clock) -> None:
    clock.begin(clock.request("computing"))
    clock.first_tokens.looked_up(clock.request("waiting"), 0)
    for name in ("computing", "waiting"):
        clock.first_tokens.finished(name)
    assert clock.seen() == {} and not clock.tracked


def test_a_request_preempted_before_its_first_token_counts_from_its_arrival_and_by_its_last_start(clock: Clock) -> None:
    request = clock.request()
    clock.begin(request)
    clock.now += 5.0
    clock.first_tokens.looked_up(request, 0)
    clock.first_tokens.loaded("r", 96)
    request.num_computed_tokens = 96
    clock.first_tokens.step(["r"])
    request.num_output_tokens = 1
    clock.first_tokens.step(["r"])
    assert clock.seen() == {"tier": (1, 5.0)}


@pytest.mark.parametrize(
    ("num_local", "loaded", "num_found", "source"),
    [
        (0, None, 0, "computed"),
        (64, None, 64, "device"),
        (64, None, 80, "device"),  # part of a block is the device's too
        (0, 64, 64, "tier"),
        (32, 48, 80, "tier"),
        (48, 16, 64, "device"),
        (0, 32, 32, "computed"),
        (0, 0, 64, "other"),
    ],
)
def test_the_source_is_where_most_of_the_prompt_came_from(
    clock: Clock, num_local: int, loaded: int | None, num_found: int, source: str
) -> None:
    request = clock.request()
    clock.first_tokens.looked_up(request, num_local)
    if loaded is not None:
        clock.first_tokens.loaded("r", loaded)
    request.num_computed_tokens = num_found
    clock.first_tokens.step(["r"])
    request.num_output_tokens = 1
    clock.first_tokens.step(["r"])
    assert list(clock.seen()) == [source]
