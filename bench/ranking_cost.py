# SPDX-License-Identifier: Apache-2.0
"""What a ranking of a disk tier costs, and which thread: ``python -m bench.ranking_cost`` (docs/eviction.md).

An index has a prompt of one chunk and one state for each restore point, and the catalogue of a temporary root the same
objects. The scheduler's thread ranks a part a step; the bookkeeper's makes times of the ranking and publishes them.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from statistics import median

from bench.geometries import DEFAULT_MODEL, MODELS
from bench.measure import percentile, table
from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.disk.catalogue import Catalogue, Name, Namespace, Scored, StoredObject
from vllm_overlay.tiers.disk.manager import STEP_S
from vllm_overlay.tiers.disk.ranking import MOST_S, Ranker, times_of
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.base import Ranked

_SERVED = Namespace("a" * 64, "a" * 64)
_UNIT = 512
_ROWS = 4096


def prompts(num_points: int) -> Iterator[list[PlannedObject]]:
    """Each a chunk and a state of its own."""
    planner = HybridOffloadPlanner(MODELS[DEFAULT_MODEL].geometry(_UNIT))
    for number in range(num_points):
        keys = [number.to_bytes(32, "little")]
        yield [*planner.store_plan(keys, {}, _UNIT), planner.snapshot(keys, _UNIT)]


def filled_ranker(num_points: int) -> Ranker:
    """Of an index in which all was stored just now. A ranking is due."""
    clock = iter([0.0])
    ranker = Ranker(MODELS[DEFAULT_MODEL].geometry(_UNIT), 1, clock=lambda: next(clock, MOST_S))
    index = PrefixIndex(None, ranker.policy)
    objects = (item for prompt in prompts(num_points) for item in prompt)
    for ticket, item in enumerate(objects, start=1):
        index.reserve(item, ticket)
        index.commit(ticket)
    return ranker


def ranked_in_parts(ranker: Ranker) -> tuple[list[Ranked], list[float]]:
    """A ranking, and the processor's seconds of each step."""
    seconds = []
    while True:
        began = time.thread_time()
        ranking = ranker.advance(time.perf_counter() + STEP_S)
        seconds.append(time.thread_time() - began)
        if ranking is not None:
            return ranking, seconds


def filled_catalogue(root: str, num_points: int) -> Catalogue:
    """With the same objects."""
    catalogue = Catalogue(root)
    now = int(time.time())
    catalogue.join([_SERVED], now)
    catalogue.begin_rebuild()
    objects = (item for prompt in prompts(num_points) for item in prompt)
    catalogue.adopt(StoredObject(_SERVED.fingerprint, item, 1, item.num_bytes, 1, now) for item in objects)
    catalogue.end_rebuild()
    return catalogue


def scores_of(ranking: Sequence[Ranked]) -> Iterator[Scored]:
    for item in times_of(ranking, time.time() - MOST_S):
        yield Scored(Name(_SERVED.fingerprint, item.object_id), item.evict_as, item.until + 1.0)


def seconds_of(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def published(catalogue: Catalogue, scores: Iterator[Scored]) -> list[float]:
    """Seconds of each turn of the bookkeeper."""
    expires_at = int(time.time() + MOST_S)
    turns = []
    while part := list(islice(scores, _ROWS)):
        began = time.perf_counter()
        catalogue.publish_scores(part, expires_at)
        turns.append(time.perf_counter() - began)
    return turns


def row_of(num_points: int) -> tuple[str, ...]:
    """One line of the table; in milliseconds."""
    ranking, steps = ranked_in_parts(filled_ranker(num_points))
    sorting = seconds_of(lambda: next(times_of(ranking, 0.0)))
    with tempfile.TemporaryDirectory() as root:
        catalogue = filled_catalogue(root, num_points)
        turns = published(catalogue, scores_of(ranking))
        catalogue.close()
    figures = (sum(steps), median(steps), percentile(steps, 0.99), max(steps), sorting, sum(turns), max(turns))
    return (str(len(ranking)), str(len(steps)), *(f"{1000 * figure:.2f}" for figure in figures))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.ranking_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--points", type=int, nargs="+", default=[10_000, 100_000], help="restore points (default: %(default)s)"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    columns = ["points", "steps", "scheduler, all", "median", "p99", "longest"]
    columns += ["times", "catalogue, all", "longest turn"]
    print(table(columns, [row_of(count) for count in arguments.points]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
