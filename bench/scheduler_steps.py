# SPDX-License-Identifier: Apache-2.0
"""How long the disk tier keeps the scheduler's thread, at a reset and while a full tier stores (docs/benchmarks.md)."""

import gc
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.disk_lab import halves, parser, prompts, scratch
from bench.measure import percentile, table
from vllm_overlay.tiers.base import StoreTicket
from vllm_overlay.tiers.disk.files.format import file_bytes
from vllm_overlay.tiers.disk.settings import DiskTierSettings

_OBJECT_BYTES = 4096
_STORES_A_STEP = 16
_STEP_S = 0.001


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one step by the clock and of the processor, and how often it waited for another thread or lost its
    core. A step that waits for nothing on disk waits for Python's interpreter lock or for a core."""

    seconds: float
    cpu_seconds: float
    num_waits: int
    num_preemptions: int


class Stopwatch:
    """Times what runs between its start and ``stop``, in one thread."""

    def __init__(self) -> None:
        self._usage = resource.getrusage(resource.RUSAGE_THREAD)
        self._cpu = time.thread_time()
        self._began = time.perf_counter()

    def stop(self) -> Step:
        seconds = time.perf_counter() - self._began
        cpu_seconds = time.thread_time() - self._cpu
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        waits, preemptions = usage.ru_nvcsw - self._usage.ru_nvcsw, usage.ru_nivcsw - self._usage.ru_nivcsw
        return Step(seconds, cpu_seconds, waits, preemptions)


class Scheduler:
    """One tier's scheduler: a step takes news in, commits what was stored, and asks for tickets."""

    def __init__(self, root: str, num_objects: int) -> None:
        settings = DiskTierSettings(root=root, capacity_bytes=num_objects * file_bytes(_OBJECT_BYTES), min_free_bytes=0)
        self.tier, self._worker = halves(settings, _OBJECT_BYTES)
        self._prompts = prompts(_OBJECT_BYTES)
        self._next = next(self._prompts)
        self._done: list[int] = []
        self.num_stored = 0
        self.steps: list[Step] = []

    def step(self, may_store: bool = True, may_reset: bool = False) -> None:
        """One step, and what the worker does after it, which is not timed."""
        watch = Stopwatch()
        if may_reset:
            self.tier.clear()
        self.tier.advance()
        self.tier.commit_all(self._done)
        tickets = self._reserve() if may_store else []
        self.steps.append(watch.stop())
        self._store(tickets)
        time.sleep(_STEP_S)

    def _reserve(self) -> list[StoreTicket]:
        tickets: list[StoreTicket] = []
        while len(tickets) < _STORES_A_STEP:
            if (ticket := self.tier.reserve(self._next)) is None:
                if not self.tier.has_or_awaits(self._next.object_id) and self._has_lost_its_prompt():
                    self._next = next(self._prompts)
                    continue
                break
            tickets.append(ticket)
            self._next = next(self._prompts)
        return tickets

    def _has_lost_its_prompt(self) -> bool:
        """After a reset, or when the chunk before was evicted."""
        return not all(self.tier.has_or_awaits(parent) for parent in self._next.parents)

    def _store(self, tickets: list[StoreTicket]) -> None:
        for ticket in tickets:
            while (buffer := self._worker.begin_store(ticket)) is None:
                time.sleep(_STEP_S)
            self._worker.submit_store(ticket, buffer)
        stored, _ = self._worker.poll()
        if any(result.reason for result in stored):
            raise RuntimeError(f"a store failed: {stored}")
        self._done = [result.ticket for result in stored]
        self.num_stored += len(stored)

    def close(self) -> None:
        self._worker.close(10.0)
        self.tier.close()


def row_of(what: str, steps: Sequence[Step]) -> tuple[str, ...]:
    """One line of the table, in milliseconds."""
    seconds = [step.seconds for step in steps]
    longest = max(steps, key=lambda step: step.seconds)
    most_cpu = max(step.cpu_seconds for step in steps)
    figures = (median(seconds), percentile(seconds, 0.99), percentile(seconds, 0.999), longest.seconds)
    return (
        what,
        str(len(steps)),
        *(f"{1000 * figure:.2f}" for figure in figures),
        f"{1000 * longest.cpu_seconds:.2f}, {longest.num_waits}, {longest.num_preemptions}",
        f"{1000 * most_cpu:.2f}",
    )


def measure(root: str, num_objects: int, seconds: float) -> list[tuple[str, ...]]:
    """Fill a tier, go on storing for so long, and reset it."""
    scheduler = Scheduler(root, num_objects)
    gc.collect()
    gc.freeze()  # as vLLM's engine does when it has started
    while scheduler.num_stored < num_objects and not scheduler.tier.usage().evicted_objects:
        scheduler.step()
    rows = [row_of("while the tier fills", scheduler.steps)]
    scheduler.steps = []
    stored, end = scheduler.num_stored, time.monotonic() + seconds
    while time.monotonic() < end:
        scheduler.step()
    rate = (scheduler.num_stored - stored) / seconds
    rows.append(row_of(f"full: stores {rate:.0f}/s and evicts", scheduler.steps))
    scheduler.steps = []
    end = time.monotonic() + 3.0
    scheduler.step(may_reset=True)
    reset = scheduler.steps[0].seconds
    while time.monotonic() < end:
        scheduler.step(may_store=False)
    rows.append(row_of(f"a reset ({1000 * reset:.2f} ms), and 3 s after", scheduler.steps))
    scheduler.close()
    return rows


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--objects", type=int, default=50_000, help="that the tier holds; default: %(default)s")
    made.add_argument("--seconds", type=float, default=15.0, help="of storing when full; default: %(default)s")
    arguments = made.parse_args()
    load = os.getloadavg()[0]
    with scratch(arguments.directory) as place:
        rows = measure(str(place / "root"), arguments.objects, arguments.seconds)
    columns = (
        "steps of the scheduler",
        "number",
        "median, ms",
        "p99",
        "p99.9",
        "longest",
        "its CPU, waits, lost cores",
        "most CPU",
    )
    print(f"{arguments.objects:,} objects, load average {load:.1f}\n\n{table(columns, rows)}")


if __name__ == "__main__":
    main()
