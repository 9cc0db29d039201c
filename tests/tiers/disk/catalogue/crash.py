# SPDX-License-Identifier: Apache-2.0
"""Engines that are killed at random moments and in chosen statements, and what the catalogue says afterwards."""

import argparse
import os
import random
import signal
import sqlite3
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.inside import find, granted
from tests.tiers.disk.catalogue.objects import MODEL, NOW, OTHERS, PRIVATE, Engine
from tests.waiting import PATIENCE_S
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import Committed, File, Limits, Scored, StoredObject, connection, schema

OBJECT = 8192
CAPACITY = 400 * OBJECT
_PROMPT = 8


@dataclass(slots=True)
class Tally:
    """Sums over all kills. ``in_statements`` killed themselves before a statement of SQL that chance chose, or right
    after a COMMIT."""

    kills: int = 0
    in_statements: int = 0
    committed: int = 0
    granted_bytes: int = 0
    interrupted_unlinks: int = 0


class Log:
    """What a process did for good, written before it does the next thing."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, verb: str, files: Iterable[File]) -> None:
        os.write(self._fd, "".join(f"{verb} {each.writer} {each.number}\n" for each in files).encode())


def kill_in_statement(count: int, after_commit: bool) -> None:
    """From now on every connection of this process counts statements, or its commits, and the process ends before the
    statement, or after the commit."""
    left = count
    configure, commit = schema.configure, connection.Connection._commit

    def count_one(statement: str = "") -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_and_count(db: sqlite3.Connection) -> None:
        configure(db)
        db.set_trace_callback(count_one)

    def commit_and_count(of: connection.Connection) -> None:
        commit(of)
        count_one()

    if after_commit:
        connection.Connection._commit = commit_and_count  # type: ignore[assignment, method-assign]
    else:
        schema.configure = configure_and_count


def work_until_killed(root: Path, seed: int, doom: tuple[int, bool] | None, log_path: Path) -> None:
    """Commits, replaces, touches, scores and evicts."""
    draw = random.Random(seed)
    log = Log(log_path)
    engine = Engine(root, draw.choice((MODEL, OTHERS, PRIVATE)))
    if doom:
        kill_in_statement(*doom)
        engine.catalogue.leave(engine.name)
        engine.close()
        engine = Engine(root)
    last = 0
    while True:
        first = draw.randrange(1000) * _PROMPT
        batch = []
        for number in range(first, first + draw.randrange(1, _PROMPT)):
            last += 1
            batch.append(engine.stored(number, (number - 1,) if number > first else (), file=last))
        grant = engine.grant(len(batch) * OBJECT, OBJECT, CAPACITY)
        if grant.short_bytes:
            remove(engine, log, grant.short_bytes)
        there = {item.object_id: item.file for item in find(engine.catalogue, engine.namespace.fingerprint, ids(batch))}
        replaced = [there.get(item.object_id) if draw.random() < 0.3 else None for item in batch]
        log.write("may_replace", filter(None, replaced))
        answers = engine.catalogue.commit(engine.name, zip(batch, replaced, strict=True))
        log.write("committed", [answer.file for answer in answers if isinstance(answer, Committed) and answer.is_paid])
        engine.catalogue.touch(engine.namespace.fingerprint, ids(batch), NOW + draw.randrange(100))
        scored = [Scored(batch[0].object_id, NOW + draw.random(), NOW + 100)]
        engine.catalogue.publish_scores(engine.namespace.fingerprint, scored, NOW + draw.randrange(100))


def ids(batch: list[StoredObject]) -> list[ObjectId]:
    return [item.object_id for item in batch]


def remove(engine: Engine, log: Log, num_bytes: int) -> None:
    gone = engine.evict(Limits(num_bytes, 64), NOW + 50)
    log.write("removed", [item.file for item in gone])
    engine.collected(gone, num_bytes, CAPACITY)
    log.write("collected", [item.file for item in gone])


def read_logs(paths: list[Path]) -> dict[str, set[File]]:
    """Every file that anybody committed, wanted to replace, took out and unlinked."""
    found: dict[str, set[File]] = defaultdict(set)
    for line in (line for path in paths for line in path.read_text().splitlines(keepends=True)):
        if line.endswith("\n"):
            verb, writer, number = line.split()
            found[verb].add(File(writer, int(number)))
    return found


def examine(root: Path, logs: list[Path], tally: Tally) -> None:
    """Assert that nothing is lost or counted wrong, then look after the dead as a living engine would."""
    one = Engine(root)
    assert check(one.catalogue) == []
    assert one.catalogue.totals().num_bytes <= CAPACITY
    said = read_logs(logs)
    assert said["collected"] <= said["removed"]
    there = {item.file for part in one.catalogue.load_all() for item in part}
    garbage = said["committed"] - there & one.catalogue.named(said["committed"])
    assert said["committed"] - said["removed"] - garbage <= there
    assert len(garbage - said["may_replace"] - said["removed"]) <= len(logs) * 64, "more than one eviction each"
    assert not said["collected"] & there
    for dead, (_, num_bytes) in granted(one.catalogue).items():
        if dead != one.name:
            one.catalogue.bury(dead, one.name)
            tally.granted_bytes += num_bytes
    unlinked = one.catalogue.garbage(one.name)
    tally.interrupted_unlinks += len(unlinked)
    while unlinked:
        one.collected(unlinked)
        unlinked = one.catalogue.garbage(one.name)
    totals = one.catalogue.totals()
    assert totals.num_bytes == totals.object_bytes and check(one.catalogue) == []
    assert one.catalogue.writers() == {one.name}
    tally.committed += len(said["committed"])
    one.catalogue.leave(one.name)
    one.close()


def start(root: Path, seed: int, doom: tuple[int, bool] | None, log: Path) -> BaseProcess:
    process = get_context("fork").Process(target=work_until_killed, args=(root, seed, doom, log))
    process.start()
    return process


def run(root: Path, kills: int, seed: int) -> Tally:
    """Two processes at a time, one killed in a statement that chance chooses, one by the clock."""
    draw = random.Random(seed)
    tally = Tally()
    first = Engine(root)
    first.catalogue.leave(first.name)
    first.close()
    for round_ in range((kills + 1) // 2):
        logs = [root / f"log-{round_}-{which}" for which in range(2)]
        seeds = [draw.randrange(1 << 30) for _ in logs]
        after_commit = draw.random() < 0.3
        doom = draw.randrange(1, 300 if after_commit else 3000), after_commit
        doomed = start(root, seeds[0], doom, logs[0])
        other = start(root, seeds[1], None, logs[1])
        time.sleep(draw.uniform(0.05, 0.6))
        for process in (other, doomed):
            if process is doomed and draw.random() < 0.8:
                process.join(PATIENCE_S)
            tally.in_statements += process.exitcode is not None
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL, "it failed before it was killed"
            tally.kills += 1
        examine(root, [log for log in logs if log.exists()], tally)
        for log in logs:
            log.unlink(missing_ok=True)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(run(Path(scratch), arguments.kills, arguments.seed))


if __name__ == "__main__":
    main()
