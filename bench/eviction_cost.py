# SPDX-License-Identifier: Apache-2.0
"""What eviction costs: ``python -m bench.eviction_cost`` (docs/eviction.md). No engine, no bytes of objects.

First a policy, on the scheduler's thread: cold prompts are stored into a full CPU tier in chunks of 64 tokens, and a
prompt that it has is looked up and acquired, with each policy in turns. Then a ranking of a disk tier: the scheduler's
thread ranks a part a step, the bookkeeper's publishes the scores in the catalogue of a temporary root. The sizes are
Qwen3.5-35B-A3B's.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from msgspec import structs

from bench.geometries import DEFAULT_MODEL, MODELS
from bench.hit_replay import Clock
from bench.measure import percentile, table
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.cpu import CpuTierManager
from vllm_overlay.tiers.disk.catalogue import Catalogue, File, Namespace, Scored, StoredObject
from vllm_overlay.tiers.disk.manager import STEP_S
from vllm_overlay.tiers.disk.ranking import MOST_S, Ranker, times_of
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.memory import unit_size, units_needed
from vllm_overlay.tiers.policies.base import EvictionPolicy, Ranked
from vllm_overlay.tiers.policies.guarded import GuardedPolicy
from vllm_overlay.tiers.policies.learned import LearnedEviction
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed

MODEL = MODELS[DEFAULT_MODEL]
UNIT = 64
STEP_OBJECTS = 2048 // UNIT
"""Chunks of a prefill step of 2,048 tokens."""
POINT_TOKENS = 512
"""Of each restore point that is ranked: a prompt of one chunk and one state."""
PUBLISHED = 4096
"""Scores of one turn of the bookkeeper."""
POLICIES: dict[str, Callable[[Clock], EvictionPolicy[Entry]]] = {
    "lru": lambda _: LeastRecentlyUsed[Entry](),
    "learned": lambda clock: GuardedPolicy(LearnedEviction(clock)),
}
_SERVED = Namespace("a" * 64)
_WRITER = "0" * 16


@dataclass(slots=True)
class Prompt:
    """One that shares nothing with others, with all that a tier stores of it."""

    keys: list[bytes]
    num_tokens: int
    objects: list[PlannedObject]


def prompts(num_tokens: int, unit: int) -> Iterator[Prompt]:
    """Without end."""
    geometry = MODEL.geometry(unit)
    planner = HybridOffloadPlanner(geometry)
    boundary = geometry.floor_to_restore_point(num_tokens - 1)
    for number in itertools.count():
        keys = [(number << 20 | place).to_bytes(32, "little") for place in range(num_tokens // unit)]
        objects = planner.store_plan(keys, {}, num_tokens)
        yield Prompt(keys, num_tokens, [*objects, planner.snapshot(keys, boundary)])


@dataclass(slots=True)
class Subject:
    """A full tier with one policy. Times are milliseconds of this thread on a processor, a prompt."""

    name: str
    tier: CpuTierManager
    planner: HybridOffloadPlanner
    clock: Clock
    bytes_per_object: float = 0.0
    stores: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)

    def store(self, prompt: Prompt) -> None:
        """As prefill steps do: tickets for each step's objects, which all ranks then have stored."""
        for start in range(0, len(prompt.objects), STEP_OBJECTS):
            tickets = self.tier.reserve_all(prompt.objects[start : start + STEP_OBJECTS])
            self.tier.commit_all([ticket.ticket for ticket in tickets if ticket is not None])

    def hit(self, prompt: Prompt) -> None:
        lookup = self.planner.lookup(prompt.keys, prompt.num_tokens, 0, self.tier.index)
        planned = self.planner.load_plan(prompt.keys, 0, lookup.restore_point)
        tickets = self.tier.acquire(planned)
        assert tickets, "a prompt that was just stored is gone"
        self.tier.release(tickets)

    def measure(self, action: Callable[[Prompt], None], prompt: Prompt, times: list[float]) -> None:
        self.clock.now += 1.0
        started = time.thread_time()
        action(prompt)
        times.append(1e3 * (time.thread_time() - started))


def filled(name: str, num_objects: int, source: Iterator[Prompt]) -> Subject:
    """A full tier."""
    geometry = MODEL.geometry(UNIT)
    clock = Clock()
    policy = POLICIES[name](clock)
    policy.serve(geometry)
    first = next(source)
    num_prompts = num_objects // len(first.objects)
    unit_bytes = unit_size(geometry.smallest_object_bytes)
    num_units = num_prompts * sum(units_needed(item.num_bytes, unit_bytes) for item in first.objects)
    subject = Subject(name, CpuTierManager(num_units, unit_bytes, 1, policy), HybridOffloadPlanner(geometry), clock)
    before = resident_bytes()
    for prompt in itertools.islice(source, num_prompts):
        clock.now += 1.0
        subject.store(prompt)
    subject.bytes_per_object = (resident_bytes() - before) / max(1, len(subject.tier.index))
    return subject


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


POLICY_COLUMNS = ("policy", "objects", "store, median", "p95", "hit, median", "p95", "memory an object")


def policy_rows(num_objects: int, num_tokens: int, num_rounds: int) -> Iterator[Sequence[object]]:
    source = prompts(num_tokens, UNIT)
    subjects = [filled(name, num_objects, source) for name in POLICIES]
    cold = list(itertools.islice(source, num_rounds))
    for prompt in cold:
        for subject in subjects:
            subject.measure(subject.store, prompt, subject.stores)
    for _ in cold:
        for subject in subjects:
            subject.measure(subject.hit, cold[-1], subject.hits)
    for subject in subjects:
        both = (subject.stores, subject.hits)
        times = (f"{value:.2f} ms" for one in both for value in (median(one), percentile(one, 0.95)))
        yield subject.name, len(subject.tier.index), *times, f"{subject.bytes_per_object:.0f} B"


def objects_of(num_points: int) -> Iterator[PlannedObject]:
    for prompt in itertools.islice(prompts(POINT_TOKENS + 1, POINT_TOKENS), num_points):
        yield from prompt.objects


def filled_ranker(num_points: int) -> Ranker:
    """Of an index in which all was stored just now. A ranking is due."""
    clock = iter([0.0])
    ranker = Ranker(MODEL.geometry(POINT_TOKENS), 1, clock=lambda: next(clock, MOST_S))
    index = PrefixIndex(None, ranker.policy)
    for ticket, item in enumerate(objects_of(num_points), start=1):
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
    catalogue.join(_WRITER, _SERVED)
    catalogue.adopt(
        StoredObject(_SERVED.fingerprint, in_catalogue(item), File(_WRITER, number), 1, item.num_bytes, now)
        for number, item in enumerate(objects_of(num_points))
    )
    catalogue.end_rebuild()
    return catalogue


def in_catalogue(item: PlannedObject) -> PlannedObject:
    """As the tier writes it: a snapshot's kind names the facts that decide about its numbers."""
    return structs.replace(item, object_id=kept_as(item.object_id))


def kept_as(object_id: ObjectId) -> ObjectId:
    return ObjectId("s" + "0" * 16, object_id.key) if object_id.is_snapshot else object_id


def published(catalogue: Catalogue, ranking: Iterable[Ranked]) -> list[float]:
    """Seconds of each turn of the bookkeeper, without the sorting before the first."""
    scores = (
        Scored(kept_as(item.object_id), item.score, item.until + 1.0)
        for item in times_of(list(ranking), time.time() - MOST_S)
    )
    turns = []
    while part := list(itertools.islice(scores, PUBLISHED)):
        began = time.perf_counter()
        catalogue.publish_scores(_SERVED.fingerprint, part, int(time.time() + MOST_S))
        turns.append(time.perf_counter() - began)
    return turns


RANKING_COLUMNS = ("points", "steps", "scheduler, all", "median", "p99", "longest", "catalogue, all", "longest turn")


def ranking_row(num_points: int) -> Sequence[object]:
    """In milliseconds."""
    ranking, steps = ranked_in_parts(filled_ranker(num_points))
    with tempfile.TemporaryDirectory() as root:
        catalogue = filled_catalogue(root, num_points)
        turns = published(catalogue, ranking)
        catalogue.close()
    figures = (sum(steps), median(steps), percentile(steps, 0.99), max(steps), sum(turns), max(turns))
    return len(ranking), len(steps), *(f"{1000 * figure:.2f}" for figure in figures)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.eviction_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--objects", type=int, default=100_000, help="in each CPU tier (default: %(default)s)")
    made.add_argument("--tokens", type=int, default=12_000, help="of a prompt (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=100, help="prompts that are timed (default: %(default)s)")
    made.add_argument(
        "--points", type=int, nargs="+", default=[10_000, 100_000], help="that are ranked (default: %(default)s)"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    print(table(POLICY_COLUMNS, policy_rows(arguments.objects, arguments.tokens, arguments.rounds)))
    print("\n" + table(RANKING_COLUMNS, map(ranking_row, arguments.points)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
