# SPDX-License-Identifier: Apache-2.0
"""Simulated services: prompts, what a CPU and a disk tier have of each, and what loading and computing it takes.

Bytes are those of Qwen3.5-35B-A3B: 20,480 a token of attention, 63 MB a snapshot. Nothing runs: times are drawn.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

TOKEN_BYTES, SNAPSHOT_BYTES = 20_480, 63_000_000
CPU_BYTES_PER_S = 20e9
_ROUND_TRIP_S = 0.005
_NOISE = 0.2
"""Sigma of the lognormal factor of each load."""
CPU, DISK = 0, 1
LOAD_SHARE = 0.6
"""Arrivals, as a share of what computing every prompt would allow."""


@dataclass(frozen=True, slots=True)
class Service:
    """``prefill_rate``: tokens computed a second. ``disk_rate``: bytes the disk reads a second."""

    prefill_rate: float
    disk_rate: float

    @property
    def compute_s(self) -> float:
        """Of one token."""
        return 1 / self.prefill_rate


@dataclass(frozen=True, slots=True)
class Condition:
    """What goes wrong with the disk. ``slow``: the factor of its loads in the middle third of the requests.

    ``slow_share``, ``slow_times``: the share of its loads that take so many times as long. ``slow_at_first``: so many
    of its first loads do.
    """

    name: str
    slow: float = 1.0
    slow_share: float = 0.0
    slow_times: float = 20.0
    slow_at_first: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. ``offers``, ``loads``, ``typical``: of the CPU and the disk tier, tokens and seconds.

    ``typical`` is what the load takes on average at that time, ``loads`` what this one takes.
    """

    at: float
    prompt: int
    offers: tuple[int, int]
    loads: tuple[float, float]
    typical: tuple[float, float]


def requests(service: Service, condition: Condition, number: int, seed: int) -> Iterator[Arrival]:
    """Arrivals, and loads that do not slow one another."""
    source = random.Random(seed)
    now, mean_prompt = 0.0, 15_000
    for index in range(number):
        now += source.expovariate(LOAD_SHARE / (mean_prompt * service.compute_s))
        prompt = int(min(120_000, max(500, source.lognormvariate(9.2, 1.0))))
        offers = _offers(source, prompt)
        slow = condition.slow if number <= 3 * index < 2 * number else 1.0
        factors = (1.0, slow * _outlier(source, condition, index))
        expected = (1.0, slow * (1 + condition.slow_share * (condition.slow_times - 1)))
        seconds = tuple(
            load_s(offers[tier], rate) for tier, rate in ((CPU, CPU_BYTES_PER_S), (DISK, service.disk_rate))
        )
        noise = [source.lognormvariate(0, _NOISE) for _ in seconds]
        yield Arrival(
            now,
            prompt,
            offers,
            (seconds[CPU] * noise[CPU], seconds[DISK] * noise[DISK] * factors[DISK]),
            (seconds[CPU], seconds[DISK] * expected[DISK]),
        )


def _offers(source: random.Random, prompt: int) -> tuple[int, int]:
    """30 % of prompts are new. Of the others the disk has a part, and the CPU tier nothing, all or a part of that."""
    on_disk = int(prompt * source.uniform(0.3, 1)) if source.random() < 0.7 else 0
    kind = source.random()
    in_cpu = 0 if kind < 0.4 else on_disk if kind < 0.6 else int(on_disk * source.random())
    return in_cpu, on_disk


def _outlier(source: random.Random, condition: Condition, index: int) -> float:
    is_slow = source.random() < condition.slow_share or index < condition.slow_at_first
    return condition.slow_times if is_slow else 1.0


def load_s(tokens: int, bytes_per_s: float) -> float:
    """What a load of a snapshot and the attention of ``tokens`` takes on average."""
    return _ROUND_TRIP_S + (SNAPSHOT_BYTES + TOKEN_BYTES * tokens) / bytes_per_s
