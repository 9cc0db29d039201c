# SPDX-License-Identifier: Apache-2.0
"""What storing costs when nothing is ever hit: the same new prompts go to each server in turn, again and again."""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.http_load import Api, play
from bench.scaled_trace import VOCABULARY, ScaledRequest

CONFIDENCE = 0.95


class Server(Protocol):
    """What is needed of ``bench.serving_sides.Running``."""

    @property
    def name(self) -> str: ...

    @property
    def api(self) -> Api: ...

    def settle(self) -> None:
        """Returns when nothing is under way."""

    def cpu_seconds(self) -> float:
        """What its processes have used so far."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A server's part of a round. ``seconds``: to the last answer. ``cpu_s``: of the processor, until all is stored."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of what rounds say, and where it lies with 95 % confidence."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one side: its turns, and those of the side it is compared with, in the same rounds."""

    name: str
    turns: tuple[Turn, ...]
    base: tuple[Turn, ...]

    @property
    def throughput(self) -> Ratio:
        """Over the other's, round by round."""
        return ratio([base.seconds / own.seconds for own, base in zip(self.turns, self.base, strict=True)])

    @property
    def cpu(self) -> Ratio:
        """The processor's time over the other's, round by round."""
        return ratio([own.cpu_s / base.cpu_s for own, base in zip(self.turns, self.base, strict=True)])


def ratio(values: Sequence[float]) -> Ratio:
    return Ratio(statistics.median(values), *median_interval(values))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of values, as far from both ends, that holds the median with at least 95 % confidence.

    How many of n values lie below the median is binomial, so this rests on no shape of the noise. With less than six
    values the widest pair is less sure than that.
    """
    ordered = sorted(values)
    count = len(ordered)
    outside, rank = 0.0, 0
    while rank < (count - 1) // 2:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        rank += 1
    place = max(0, rank - 1)
    return ordered[place], ordered[count - 1 - place]


def new_prompts(number: int, batch: int, prompt_tokens: int, output_tokens: int, seed: int) -> list[ScaledRequest]:
    """A round's requests, all at once. Nothing in them was ever sent before."""
    source = random.Random(f"{seed} {number}")
    return [
        ScaledRequest(0.0, tuple(source.choices(range(VOCABULARY), k=prompt_tokens)), output_tokens)
        for _ in range(batch)
    ]


def measure_cost(
    servers: Sequence[Server],
    rounds: int,
    make: Callable[[int], list[ScaledRequest]],
    done: Callable[[], object] = lambda: None,
) -> list[Cost]:
    """Each round's prompts to each server in turn. Another one begins each round; the first round does not count.

    ``done`` is called after each round. Raises RuntimeError if a request fails.
    """
    turns: list[list[Turn]] = [[] for _ in servers]
    for number in range(rounds + 1):
        requests = make(number)
        for place in range(len(servers)):
            turn = (number + place) % len(servers)
            taken = _turn(servers[turn], requests)
            if number:
                turns[turn].append(taken)
        done()
    return [Cost(one.name, tuple(own), tuple(turns[0])) for one, own in zip(servers, turns, strict=True)]


def _turn(server: Server, requests: Sequence[ScaledRequest]) -> Turn:
    """The server is waited for afterwards: its pending stores must not slow the next one."""
    used = server.cpu_seconds()
    part = play(server.api, requests)
    if part.errors:
        raise RuntimeError(f"{server.name}: {part.errors[0]}")
    server.settle()
    return Turn(part.seconds, server.cpu_seconds() - used)


COLUMNS = (
    "side",
    "seconds a round",
    "throughput of the first side's (95 % interval)",
    "processor's time of the first side's",
    "rounds",
)


def cost_rows(costs: Sequence[Cost]) -> Iterator[Sequence[object]]:
    for one in costs:
        seconds = statistics.median(turn.seconds for turn in one.turns)
        yield one.name, f"{seconds:.2f}", one.throughput, one.cpu, len(one.turns)
