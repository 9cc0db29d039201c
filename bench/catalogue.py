# SPDX-License-Identifier: Apache-2.0
"""The disk tier's catalogue under paced processes that share one root, one of which is killed (docs/benchmarks.md)."""

import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

from bench.disk_lab import parser, prompts, scratch
from bench.measure import percentile, table
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import Catalogue, Committed, File, Limits, Namespace, StoredObject

_MODEL = Namespace("a" * 64)
_OBJECT_BYTES = 1 << 20
_BATCH = 16
_PROMPT = 32
_MOST_PROCESSES = 200
_CAPACITY = 16 * 32 * 31 * _OBJECT_BYTES
"""A 31st of a 32nd of it is a batch: a process among 31 may hold no more."""
_FILLED = 0.9
_JOIN_S = 30.0
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Pace:
    """What one process asks for. ``phase``, from 0 to 1, is when in each interval: they do not all ask at once."""

    rows_per_s: float
    seconds: float
    phase: float


@dataclass(slots=True)
class Report:
    """What one process saw. Durations are of whole calls, in seconds, by operation."""

    asked: int = 0
    committed: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def time(self, operation: str, do: Callable[[], _Result]) -> _Result:
        began = time.perf_counter()
        try:
            return do()
        finally:
            self.seconds.setdefault(operation, []).append(time.perf_counter() - began)

    def all_seconds(self) -> list[float]:
        return [seconds for of_one in self.seconds.values() for seconds in of_one]


def stored_prompts(part: int, writer: str) -> Iterator[StoredObject]:
    """Endless chains of chunks, in files of ``writer``."""
    for number, planned in enumerate(prompts(_OBJECT_BYTES - 4096, _PROMPT, part)):
        yield StoredObject(_MODEL.fingerprint, planned, File(writer, number), 1, _OBJECT_BYTES, int(time.time()))


class Engine:
    """Commits, touches, grants, evicts and follows the others, as a tier's thread would."""

    def __init__(self, root: str, part: int, report: Report) -> None:
        self._report = report
        self._writer = secrets.token_hex(8)
        self._catalogue = Catalogue(root)
        self._catalogue.join(self._writer, _MODEL)
        self._seq, _ = self._catalogue.load(_MODEL.fingerprint)
        self._items = stored_prompts(part, self._writer)
        self._pending: list[StoredObject] = []
        self._recent: list[ObjectId] = []

    def step(self, num_rows: int) -> None:
        report, catalogue, writer = self._report, self._catalogue, self._writer
        report.asked += num_rows
        self._pending += [next(self._items) for _ in range(num_rows)]
        batch, now = self._pending[: 4 * _BATCH], int(time.time())
        num_bytes = len(batch) * _OBJECT_BYTES
        grant = report.time("grant", lambda: catalogue.grant(writer, num_bytes, _OBJECT_BYTES, _CAPACITY))
        if grant.short_bytes:
            limits = Limits(grant.short_bytes, 64)
            gone = [item.file for item in report.time("evict", lambda: catalogue.evict(writer, limits, now))]
            report.time("collected", lambda: catalogue.collected(writer, gone, grant.short_bytes, _CAPACITY))
        answers = report.time("commit", lambda: catalogue.commit(writer, [(item, None) for item in batch]))
        self._keep([isinstance(answer, Committed) for answer in answers], batch)
        report.time("touch", lambda: catalogue.touch(_MODEL.fingerprint, self._recent, now))
        changes = report.time("changes_since", lambda: catalogue.changes_since(self._seq, _MODEL.fingerprint))
        self._seq = changes.seq

    def _keep(self, is_taken: list[bool], batch: list[StoredObject]) -> None:
        """What was refused is tried again."""
        taken = [item.object_id for item, taken in zip(batch, is_taken, strict=True) if taken]
        refused = [item for item, taken in zip(batch, is_taken, strict=True) if not taken]
        self._report.committed += len(taken)
        self._pending = refused + self._pending[len(batch) :]
        self._recent = taken[-4 * _BATCH :]

    def close(self) -> None:
        self._catalogue.leave(self._writer)
        self._catalogue.close()


def run_engine(root: str, part: int, pace: Pace, parent: Connection) -> None:
    """One process: a batch each time that one is due."""
    report = Report()
    engine = Engine(root, part, report)
    parent.send("ready")
    parent.recv()
    began = time.perf_counter()
    num_steps = int(pace.rows_per_s * pace.seconds / _BATCH)
    for number in range(num_steps):
        due = began + (number + pace.phase) * _BATCH / pace.rows_per_s
        time.sleep(max(0.0, due - time.perf_counter()))
        if time.perf_counter() - began > pace.seconds:
            report.asked += (num_steps - number) * _BATCH  # it fell behind: what was due and not begun
            break
        engine.step(_BATCH)
    engine.close()
    parent.send(report)


@dataclass(slots=True)
class Outcome:
    """What all processes of one root did. ``most_bytes`` is the most that objects and grants were."""

    reports: list[Report]
    most_bytes: int


def compete(root: str, num_processes: int, rows_per_s: float, seconds: float) -> Outcome:
    """Runs the processes. After half the time it kills the first one."""
    watcher = fill(root, int(_CAPACITY * _FILLED) // _OBJECT_BYTES)
    rate = rows_per_s / num_processes
    children = [start(root, part, Pace(rate, seconds, part / num_processes)) for part in range(num_processes)]
    for _, ours in children:
        ours.recv()
    for _, ours in children:
        ours.send("go")
    most_bytes = watch(watcher, seconds / 2)
    children[0][0].kill()
    children[0][0].join()
    most_bytes = max(most_bytes, watch(watcher, seconds / 2))
    reports = collect(children[1:])
    watcher.close()
    return Outcome(reports, most_bytes)


def start(root: str, part: int, pace: Pace) -> tuple[BaseProcess, Connection]:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_engine, args=(root, part, pace, theirs))
    process.start()
    return process, ours


def collect(children: Iterable[tuple[BaseProcess, Connection]]) -> list[Report]:
    reports = []
    for process, ours in children:
        if not wait([ours], _JOIN_S):
            raise RuntimeError(f"process {process.pid} has not ended")
        reports.append(ours.recv())
        process.join()
    return reports


def fill(root: str, num_objects: int) -> Catalogue:
    """A complete catalogue with so many objects, and no writer."""
    os.makedirs(root, 0o700, exist_ok=True)
    catalogue = Catalogue(root)
    items = stored_prompts(_MOST_PROCESSES + 1, secrets.token_hex(8))
    catalogue.adopt((next(items) for _ in range(num_objects)), [_MODEL])
    catalogue.end_rebuild()
    return catalogue


def watch(catalogue: Catalogue, seconds: float) -> int:
    """The most bytes that objects, grants and garbage were together."""
    most_bytes = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        most_bytes = max(most_bytes, catalogue.totals().num_bytes)
        time.sleep(0.05)
    return most_bytes


def rows_of(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """What the processes waited, got and left."""
    seconds = [report.all_seconds() for report in outcome.reports]
    yield "transactions", str(sum(map(len, seconds)))
    yield "longest wait of any transaction", _ms(max(map(max, seconds)))
    yield "p99 wait of the worst process", _ms(max(percentile(of_one, 0.99) for of_one in seconds))
    yield "median of all", _ms(statistics.median(each for of_one in seconds for each in of_one))
    for operation in sorted({each for report in outcome.reports for each in report.seconds}):
        values = [each for report in outcome.reports for each in report.seconds.get(operation, ())]
        yield f"`{operation}`: median, p99", f"{_ms(statistics.median(values))}, {_ms(percentile(values, 0.99))}"
    shares = [report.committed / report.asked for report in outcome.reports]
    yield "least-served process's share of what it asked", f"{min(shares):.1%}"
    yield "most bytes of objects, grants and garbage, of the capacity", f"{outcome.most_bytes / _CAPACITY:.1%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--processes", type=int, default=31, help="2 to 200; default: %(default)s")
    made.add_argument("--rows-per-s", type=float, default=2000.0, help="of all together; default: %(default)s")
    made.add_argument("--seconds", type=float, default=20.0, help="default: %(default)s")
    arguments = made.parse_args()
    with scratch(arguments.directory) as place:
        load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        outcome = compete(str(place / "root"), arguments.processes, arguments.rows_per_s, arguments.seconds)
    rows = [*rows_of(outcome), ("load average before", load)]
    print(table(("", f"{arguments.processes} processes, {arguments.rows_per_s:g} rows/s"), rows))


if __name__ == "__main__":
    main()
