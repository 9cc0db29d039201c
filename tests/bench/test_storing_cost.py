# SPDX-License-Identifier: Apache-2.0
"""Servers in turns with prompts that nobody has seen, and how sure the ratio is."""

import random
from itertools import count

import pytest

from bench.scaled_trace import ScaledRequest
from bench.storing_cost import Cost, Turn, measure_cost, median_interval, new_prompts
from tests.bench.test_http_load import Api


class Server:
    """Uses as many seconds of the processor a turn as its name is long."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.api, self._log = name, Api(), log
        self._looks = count()

    def settle(self) -> None:
        self._log.append(self.name)

    def cpu_seconds(self) -> float:
        return next(self._looks) * float(len(self.name))


def make(number: int) -> list[ScaledRequest]:
    return new_prompts(number, 2, 10, 3, seed=0)


def test_each_round_has_new_prompts_the_same_for_all_and_another_side_begins():
    log: list[str] = []
    servers = [Server(name, log) for name in ("a", "bb", "ccc")]
    costs = measure_cost(servers, 2, make)
    assert log == ["a", "bb", "ccc", "bb", "ccc", "a", "ccc", "a", "bb"]
    assert len(set(servers[0].api.prompts)) == 3 * 2
    assert all(set(server.api.prompts) == set(servers[0].api.prompts) for server in servers)
    assert [len(cost.turns) for cost in costs] == [2, 2, 2]  # the first round does not count
    assert [cost.cpu.median for cost in costs] == [1.0, 2.0, 3.0]


def test_a_failed_request_ends_the_measurement():
    with pytest.raises(RuntimeError, match="a: ApiError: no"):
        measure_cost([Server("a", [])], 1, lambda number: new_prompts(number, 1, 1, 3, seed=0))


def test_throughput_is_compared_within_a_round():
    """The third round was slow for both."""
    cost = Cost(
        "b", (Turn(2.0, 1.0), Turn(4.0, 1.0), Turn(20.0, 1.0)), (Turn(1.0, 1.0), Turn(2.0, 1.0), Turn(10.0, 1.0))
    )
    assert (cost.throughput.median, cost.throughput.low, cost.throughput.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(("number", "first", "last"), [(1, 1, 1), (6, 1, 6), (10, 2, 9), (30, 10, 21), (100, 40, 61)])
def test_the_interval_of_the_median_is_that_of_the_binomial(number, first, last):
    """Ranks as in tables of the sign test."""
    values = [float(value) for value in range(1, number + 1)]
    random.Random(number).shuffle(values)
    assert median_interval(values) == (first, last)
