# SPDX-License-Identifier: Apache-2.0
"""What a ``load_weight`` costs in time to first token, on simulated services: ``python -m bench.selection``.

The production rule decides for each request whether a CPU tier, a disk tier or nobody loads. It hears what loads and
steps took once they have ended. Each cell is its mean and 95th percentile time to first token, over that of an oracle.
The oracle knows what every load will take. "informed" knows what loads take on average at that time, and not the dice,
so nobody can do better by measuring. The CPU tier's weight is 1.0 beside a number and "auto" beside "auto".
"""

import argparse
import heapq
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.progress import track

from bench.measure import percentile, table
from bench.queue import Queue
from bench.services import CPU, CPU_BYTES_PER_S, DISK, LOAD_SHARE, Arrival, Condition, Service, load_s, requests
from vllm_overlay.multi_connector.load_weight import AUTO, LoadWeight
from vllm_overlay.multi_connector.selection_rules.guarded import GuardedRule
from vllm_overlay.multi_connector.selection_rules.weighted import Weighted

SHARES = (0.3, 0.8, 1.1, 1.5)
"""Arrivals under load, of what computing every prompt would allow."""
SIZES = (2_000, 10_000, 50_000)
SERVICES = [Service(prefill, disk * 1e9) for prefill in (5_000, 20_000, 50_000) for disk in (1, 3)]
CONDITIONS = (
    Condition("steady"),
    Condition("2 % of loads 20 x slower", slow_share=0.02),
    Condition("first 3 requests 20 x slower", slow_at_first=3),
    Condition("10 x slower for a third", slow=10.0),
)
WEIGHTS: tuple[float | str, ...] = (0.5, 0.8, 0.95, 1.0, AUTO)
NUMBERS = 4
"""Of the weights."""
STEP_TOKENS = 8192
Choose = Callable[[Arrival], int | None]


def first_token_s(arrival: Arrival, loader: int | None, seconds: Sequence[float], service: Service) -> float:
    """The time to first token where nothing else is served."""
    if loader is None:
        return arrival.prompt * service.compute_s
    return seconds[loader] + (arrival.prompt - arrival.offers[loader]) * service.compute_s


def knowing(service: Service, times: Callable[[Arrival], Sequence[float]]) -> Choose:
    """Whoever knows ``times`` of the loads."""

    def choose(arrival: Arrival) -> int | None:
        loaders = [None, *(tier for tier in (CPU, DISK) if arrival.offers[tier])]
        return min(loaders, key=lambda loader: first_token_s(arrival, loader, times(arrival), service))

    return choose


def weights_of(disk_weight: float | str) -> list[LoadWeight]:
    """The CPU tier's and the disk's."""
    if disk_weight == AUTO:
        return [LoadWeight(0.95, True), LoadWeight(0.8, True)]
    return [LoadWeight(1.0), LoadWeight(float(disk_weight))]


class Measuring:
    """The production rule, told of each load and step when it has ended."""

    def __init__(self, service: Service, disk_weight: float | str) -> None:
        weights = weights_of(disk_weight)
        self._service = service
        self._rule = GuardedRule("weighted", Weighted(weights), weights)
        self._noise = random.Random(1)
        self._under_way: list[tuple[float, int, int, float]] = []

    def choose(self, arrival: Arrival) -> int | None:
        while self._under_way and self._under_way[0][0] <= arrival.at:
            ended, tier, tokens, started = heapq.heappop(self._under_way)
            self._rule.load_ended(tier, tokens, ended - started, failed=False)
        self._rule.about_to_decide(0, [(tier, tokens, arrival.at - at) for _, tier, tokens, at in self._under_way])
        loader = self._rule.decide(arrival.offers, arrival.prompt, may_wait=False).chosen
        self._rule.decided(arrival.offers, arrival.prompt, loader)
        if loader is not None:
            ends = arrival.at + arrival.loads[loader]
            heapq.heappush(self._under_way, (ends, loader, arrival.offers[loader], arrival.at))
        self._compute(arrival.prompt - (0 if loader is None else arrival.offers[loader]))
        return loader

    def _compute(self, tokens: int) -> None:
        for start in range(0, tokens, STEP_TOKENS):
            step = min(STEP_TOKENS, tokens - start)
            self._rule.step_ended(step, step * self._service.compute_s * self._noise.lognormvariate(0, 0.1))


def served(arrivals: Iterable[Arrival], choose: Choose, service: Service) -> list[float]:
    """Each request's time to first token."""
    return [first_token_s(arrival, choose(arrival), arrival.loads, service) for arrival in arrivals]


def wrong(arrivals: Iterable[Arrival], choose: Choose, oracle: Choose) -> float:
    """Of the requests of which both tiers have different parts, the share for which another loads than should."""
    chosen = [
        (choose(one), oracle(one), 0 < one.offers[CPU] != one.offers[DISK] and one.offers[DISK] > 0) for one in arrivals
    ]
    mixed = [own != best for own, best, is_mixed in chosen if is_mixed]
    return sum(mixed) / len(mixed)


def sides(service: Service) -> dict[str, Callable[[], Choose]]:
    """Whoever decides, begun anew."""
    informed = {"informed": lambda: knowing(service, lambda one: one.typical)}
    return informed | {str(weight): lambda weight=weight: Measuring(service, weight).choose for weight in WEIGHTS}


def ratios(service: Service, condition: Condition, number: int, seeds: int) -> list[tuple[float, float]]:
    """Mean and 95th percentile of each side over the oracle's, all seeds together."""
    runs = [list(requests(service, condition, number, seed)) for seed in range(seeds)]
    oracle = knowing(service, lambda one: one.loads)
    best = [seconds for run in runs for seconds in served(run, oracle, service)]
    cells = []
    for begin in sides(service).values():
        found = [seconds for run in runs for seconds in served(run, begin(), service)]
        mean = statistics.mean(found) / statistics.mean(best)
        cells.append((mean, percentile(found, 0.95) / percentile(best, 0.95)))
    return cells


def wrong_shares(service: Service, number: int) -> list[str]:
    run = list(requests(service, CONDITIONS[0], number, seed=0))
    oracle = knowing(service, lambda one: one.loads)
    return [f"{wrong(run, begin(), oracle):.0%}" for begin in sides(service).values()]


def under_load(service: Service, share: float, number: int) -> list[float]:
    """Mean time to first token, in times of computing a mean prompt, with nobody loading and by the disk's weight.

    The last one is "auto" that is not told how many requests wait.
    """
    arrivals = list(requests(service, CONDITIONS[0], number, seed=0))
    sides = [[LoadWeight(0.0)] * 2, *map(weights_of, WEIGHTS)]
    slower = LOAD_SHARE / share
    queues = [Queue(service, arrivals, slower, weights) for weights in sides]
    queues.append(Queue(service, arrivals, slower, weights_of(AUTO), tells_of_waiting=False))
    runs = [queue.first_token_seconds() for queue in queues]
    mean_compute_s = statistics.mean(arrival.prompt for arrival in arrivals) * service.compute_s
    return [statistics.mean(seconds) / mean_compute_s for seconds in runs]


def print_under_load(number: int) -> None:
    """Each service at each share, and the worst of the services over the best number of the same row."""
    cases = [(share, service) for share in SHARES for service in SERVICES]
    progress = track(cases, "simulating queues", console=Console(stderr=True))
    found = {(share, service): under_load(service, share, number) for share, service in progress}
    columns = ["arrivals, of what computing allows", "service", "nobody loads", *map(str, WEIGHTS), "auto, blind"]
    rows = [[f"{share:.0%}", _name(service), *(f"{one:.2f}" for one in row)] for (share, service), row in found.items()]
    print("\nUnder load: mean time to first token, in times of computing a mean prompt\n")
    print(table(columns, rows))
    print("\nUnder load, over the best number for the service: the worst of the services\n")
    print(table([columns[0], *columns[2:]], [[f"{share:.0%}", *worst_over_best(found, share)] for share in SHARES]))


def worst_over_best(found: Mapping[tuple[float, Service], Sequence[float]], share: float) -> list[str]:
    """Of each side, the largest ratio of all services to the best number of the same service."""
    rows = [found[share, service] for service in SERVICES]
    ratios_of = [[one / min(row[1 : 1 + NUMBERS]) for one in row] for row in rows]
    return [f"{max(column):.2f}" for column in zip(*ratios_of, strict=True)]


def weights_by_hand(service: Service) -> list[str]:
    """1 - load / compute seconds of some sizes, for the table of docs/multi-connector.md."""
    shares = (1 - load_s(tokens, service.disk_rate) / (tokens * service.compute_s) for tokens in SIZES)
    return [f"{max(share, 0):.2f}" for share in shares]


Found = Mapping[tuple[Condition, Service], Sequence[tuple[float, float]]]


def simulated(number: int, seeds: int) -> Found:
    cases = [(condition, service) for condition in CONDITIONS for service in SERVICES]
    progress = track(cases, "simulating", console=Console(stderr=True))
    return {(condition, service): ratios(service, condition, number, seeds) for condition, service in progress}


def worst(condition: Condition, found: Found) -> list[str]:
    """Of each side, the largest mean and the largest 95th percentile of all services."""
    columns = zip(*(found[condition, service] for service in SERVICES), strict=True)
    return [_cell((max(mean for mean, _ in one), max(tail for _, tail in one))) for one in columns]


def _cell(ratio: tuple[float, float]) -> str:
    return f"{ratio[0]:.2f} / {ratio[1]:.2f}"


def _name(service: Service) -> str:
    return f"{service.prefill_rate / 1000:.0f} k tokens/s, disk {service.disk_rate / 1e9:.0f} GB/s"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000, help="requests a run (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs of each service and condition (default: %(default)s)"
    )
    arguments = parser.parse_args()
    names = list(sides(SERVICES[0]))
    found = simulated(arguments.requests, arguments.seeds)
    print("Time to first token over the oracle's, mean / 95th percentile, by the disk's load_weight\n")
    rows = [[condition.name, _name(service), *map(_cell, cells)] for (condition, service), cells in found.items()]
    print(table(["the disk", "service", *names], rows))
    print("\nThe worst of the services\n")
    print(table(["the disk", *names], [[condition.name, *worst(condition, found)] for condition in CONDITIONS]))
    print("\nWrong choices among requests of which both tiers have different parts, steady disk\n")
    print(table(["service", *names], [[_name(one), *wrong_shares(one, arguments.requests)] for one in SERVICES]))

    print_under_load(arguments.requests)
    print("\nThe right load_weight, by tokens loaded\n")
    rates = [Service(prefill, rate) for prefill in (5_000, 20_000, 50_000) for rate in (1e9, 3e9, 7e9, CPU_BYTES_PER_S)]
    columns = ["prefill, tokens/s", "tier, GB/s", *(f"{size:,} tokens" for size in SIZES)]
    by_hand = [[f"{one.prefill_rate:,}", f"{one.disk_rate / 1e9:.0f}", *weights_by_hand(one)] for one in rates]
    print(table(columns, by_hand))


if __name__ == "__main__":
    main()
