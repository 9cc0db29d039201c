# SPDX-License-Identifier: Apache-2.0
"""What a policy costs the scheduler's thread: ``python -m bench.policy_cost``. No engine, no bytes.

A full CPU tier of many objects, chunks of 64 tokens. Cold prompts are stored into it, and a prompt that it has is
looked up and acquired, with each policy in turns. The sizes are Qwen3.5-35B-A3B's.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.geometries import DEFAULT_MODEL, MODELS
from bench.hit_replay import Clock
from bench.measure import percentile, table
from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.cpu import CpuTierManager
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.memory import unit_size, units_needed
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.guarded import GuardedPolicy
from vllm_overlay.tiers.policies.learned import LearnedEviction
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed

UNIT = 64
STEP_OBJECTS = 2048 // UNIT
"""Chunks of a prefill step of 2,048 tokens."""
RESIDENT_BYTES = Path("/proc/self/statm")
POLICIES: dict[str, Callable[[Clock], EvictionPolicy[Entry]]] = {
    "lru": lambda _: LeastRecentlyUsed[Entry](),
    "learned": lambda clock: GuardedPolicy(LearnedEviction(clock)),
}


@dataclass(slots=True)
class Prompt:
    """One prompt of its own, with all that a tier stores of it."""

    keys: list[bytes]
    num_tokens: int
    objects: list[PlannedObject]


class Prompts:
    """Makes prompts that share nothing."""

    def __init__(self, num_tokens: int) -> None:
        geometry = MODELS[DEFAULT_MODEL].geometry(UNIT)
        self.geometry = geometry
        self.planner = HybridOffloadPlanner(geometry)
        self.unit_bytes = unit_size(geometry.smallest_object_bytes)
        self._num_tokens = num_tokens
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Prompt]:
        while True:
            number = next(self._numbers)
            keys = [(number << 20 | place).to_bytes(32, "little") for place in range(self._num_tokens // UNIT)]
            boundary = self.geometry.floor_to_restore_point(self._num_tokens - 1)
            objects = self.planner.store_plan(keys, {}, self._num_tokens)
            yield Prompt(keys, self._num_tokens, [*objects, self.planner.snapshot(keys, boundary)])

    def num_units(self, prompt: Prompt) -> int:
        """What a prompt takes in a tier."""
        return sum(units_needed(item.num_bytes, self.unit_bytes) for item in prompt.objects)


@dataclass(slots=True)
class Subject:
    """A full tier with one policy. Times are milliseconds of this thread on a processor, a prompt."""

    name: str
    tier: CpuTierManager
    planner: HybridOffloadPlanner
    clock: Clock
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
        assert self.tier.acquire(planned), "a prompt that was just stored is gone"
        self.tier.release([item.object_id for item in planned])

    def measure(self, action: Callable[[Prompt], None], prompt: Prompt, times: list[float]) -> None:
        self.clock.now += 1.0
        started = time.thread_time()
        action(prompt)
        times.append(1e3 * (time.thread_time() - started))


def resident_bytes() -> int:
    return int(RESIDENT_BYTES.read_text().split()[1]) * 4096


def filled(name: str, prompts: Prompts, num_objects: int, source: Iterator[Prompt]) -> tuple[Subject, float]:
    """A full tier, and the bytes of memory that it takes an object."""
    clock = Clock()
    policy = POLICIES[name](clock)
    policy.serve(prompts.geometry)
    first = next(source)
    num_prompts = num_objects // len(first.objects)
    tier = CpuTierManager(num_prompts * prompts.num_units(first), prompts.unit_bytes, 1, policy)
    subject = Subject(name, tier, prompts.planner, clock)
    before = resident_bytes()
    for prompt in itertools.islice(source, num_prompts):
        clock.now += 1.0
        subject.store(prompt)
    return subject, (resident_bytes() - before) / max(1, len(tier.index))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.policy_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--objects", type=int, default=100_000, help="in each tier (default: %(default)s)")
    made.add_argument("--tokens", type=int, default=12_000, help="of a prompt (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=100, help="prompts that are timed (default: %(default)s)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    prompts = Prompts(arguments.tokens)
    source = iter(prompts)
    subjects = [filled(name, prompts, arguments.objects, source) for name in POLICIES]
    cold = list(itertools.islice(source, arguments.rounds))
    for prompt in cold:
        for subject, _ in subjects:
            subject.measure(subject.store, prompt, subject.stores)
    for _ in cold:
        for subject, _ in subjects:
            subject.measure(subject.hit, cold[-1], subject.hits)
    columns = ["policy", "objects", "store, median", "p95", "hit, median", "p95", "memory an object"]
    rows = [
        (
            subject.name,
            len(subject.tier.index),
            *(
                f"{value:.2f} ms"
                for times in (subject.stores, subject.hits)
                for value in (statistics.median(times), percentile(times, 0.95))
            ),
            f"{num_bytes:.0f} B",
        )
        for subject, num_bytes in subjects
    ]
    print(table(columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
