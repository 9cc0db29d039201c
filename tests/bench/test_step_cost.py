# SPDX-License-Identifier: Apache-2.0
"""The benchmark of what a connector costs each step, without an engine."""

from collections.abc import Iterator

import pytest

from bench.measure import ratio
from bench.serving_sides import NONE
from bench.step_cost import (
    BOTH,
    CPU_ALONE,
    SIDES,
    Process,
    Stopwatch,
    processes,
    rows,
)


class Slow:
    """Hooks, one of which calls the other, and the clock that says how long they take."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def inner(self) -> str:
        self.now += 0.25
        return "answer"

    def outer(self) -> str:
        return self.inner()

    def failing(self) -> None:
        raise KeyError("x")


def test_a_hook_within_a_hook_is_counted_once() -> None:
    slow = Slow()
    stopwatch = Stopwatch(slow.clock)
    stopwatch.watch(slow, ["inner", "outer", "not there"], "worker")
    assert slow.outer() == "answer"
    (step,) = stopwatch.steps
    assert set(step.worker) == {"outer"} and step.worker["outer"] == 0.25 and not step.scheduler
    slow.inner()
    assert set(step.worker) == {"inner", "outer"}


def test_a_hook_that_raises_is_timed_and_the_next_one_too() -> None:
    slow = Slow()
    stopwatch = Stopwatch(slow.clock)
    stopwatch.watch(slow, ["failing", "inner"], "scheduler")
    with pytest.raises(KeyError):
        slow.failing()
    slow.inner()
    assert set(stopwatch.steps[-1].scheduler) == {"failing", "inner"}


def test_a_watch_that_is_over_leaves_methods_as_they_were() -> None:
    slow = Slow()
    slow.failing = len  # type: ignore[method-assign, assignment]
    stopwatch = Stopwatch(slow.clock)
    stopwatch.watch(slow, ["failing", "inner"], "scheduler")
    stopwatch.stop()
    assert slow.failing is len and "inner" not in vars(slow)


def test_a_ratio_is_that_of_rounds_and_has_an_interval() -> None:
    first = [float(number) for number in range(1, 10)]
    assert ratio([2 * number for number in first], first) == "2.00 (2.00 to 2.00)"
    # Nine rounds: with 96 % the median lies between the second and the second last.
    assert ratio([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 9.0], [1.0] * 9) == "1.40 (1.10 to 1.70)"


def test_rows_compare_with_the_first_side() -> None:
    details = {"hooks": 1e-4, "front_end": 2e-5, "calls": 7, "bytes": 600}
    found = list(rows({8: [[0.002 * (1 + place)] * 3 for place, _ in enumerate(SIDES)]}, {8: [details for _ in SIDES]}))
    assert found[0] == (8, "no connector", "2.00", "1.00 (1.00 to 1.00)", "100", 7, "20", 600)
    assert found[1][2:4] == ("4.00", "2.00 (2.00 to 2.00)")


STEPS = 20


@pytest.fixture(scope="module")
def sides() -> Iterator[list[Process]]:
    """Without a connector, with a CPU tier alone, with both tiers."""
    with processes([NONE, CPU_ALONE, BOTH], ["bench.step_cost", "--running", "1,32"]) as started:
        yield started


@pytest.mark.engine
def test_a_decode_step_costs_few_calls_and_bytes_however_many_requests_run(sides: list[Process]) -> None:
    none, alone, both = ([side.ask("counts", running, STEPS) for running in (1, 32)] for side in sides)
    assert [one["calls"] for one in none] == [0, 0]
    for found, most_calls in ((alone, 60), (both, 60)):
        assert found[0]["calls"] <= most_calls
        assert found[1]["calls"] <= found[0]["calls"] + 10
        for own, without in zip(found, none, strict=True):
            assert own["bytes"] <= without["bytes"] + 150


@pytest.mark.engine
def test_a_prompt_is_stored_in_few_calls(sides: list[Process]) -> None:
    for side in sides[1:]:
        side.send("storing_calls", 0, 3)
    alone, both = (side.answer() for side in sides[1:])
    for found, most_calls in ((alone, 1200), (both, 3100)):
        assert found["functions"]["lru.LeastRecentlyUsed.pop"] > 5, "the CPU tier does not evict"
        assert 100 < found["calls"] <= most_calls


@pytest.mark.engine
@pytest.mark.benchmarks
def test_forty_layers_of_attention_cost_as_many_calls_as_one() -> None:
    calls = []
    for layers in ("4", "160"):
        with processes([BOTH], ["bench.step_cost", "--running", "1", "--layers", layers]) as (process,):
            calls.append(process.ask("counts", 1, STEPS)["calls"])
    assert calls[0] == calls[1]
