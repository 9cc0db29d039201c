# SPDX-License-Identifier: Apache-2.0
"""Members that are killed at random moments and in chosen statements, and what the catalogue says afterwards."""

import argparse
import os
import random
import signal
import sqlite3
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import CHUNKS, NOW, OTHERS, SNAPSHOTS, member, name, stored
from tests.waiting import PATIENCE_S
from vllm_overlay.tiers.disk.catalogue import Catalogue, Limits, Name, Scored, schema

OBJECT = 8192
CAPACITY = 400 * OBJECT
_PROMPT = 8


@dataclass(slots=True)
class Tally:
    """Sums over all kills. ``in_statements`` killed themselves before a statement of SQL that chance chose."""

    kills: int = 0
    in_statements: int = 0
    committed: int = 0
    orphan_bytes: int = 0
    interrupted_removals: int = 0


class Log:
    """What a process did for good, written before it does the next thing."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, verb: str, names: list[Name]) -> None:
        lines = "".join(
            f"{verb} {each.fingerprint} {each.object_id.key.hex()} {each.object_id.tag}\n" for each in names
        )
        os.write(self._fd, lines.encode())


def kill_in_statement(count: int) -> None:
    """From now on every connection of this process counts statements, and the process ends in this one."""
    left = count
    configure = schema.configure

    def count_statement(statement: str) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_and_count(db: sqlite3.Connection) -> None:
        configure(db)
        db.set_trace_callback(count_statement)

    schema.configure = configure_and_count


def work_until_killed(root: Path, seed: int, statement: int | None, log_path: Path) -> None:
    """Commits, touches, scores, evicts and removes."""
    draw = random.Random(seed)
    log = Log(log_path)
    catalogue = member(root, *draw.sample((CHUNKS, SNAPSHOTS, OTHERS), 2), CHUNKS)
    if statement:
        kill_in_statement(statement)
        catalogue.leave()
        catalogue.close()
        catalogue = member(root, CHUNKS, SNAPSHOTS)
    while True:
        first = draw.randrange(1000) * _PROMPT
        numbers = range(first, first + draw.randrange(1, _PROMPT))
        batch = [stored(number, (number - 1,) if number > first else ()) for number in numbers]
        grant = catalogue.grant(len(batch) * OBJECT, OBJECT, CAPACITY)
        if grant.short_bytes:
            remove(catalogue, log, grant.short_bytes)
        refused = {item.name for item, _ in catalogue.commit(batch).refused}
        log.write("committed", [item.name for item in batch if item.name not in refused])
        catalogue.touch([item.name for item in batch], NOW + draw.randrange(100))
        catalogue.publish_scores([Scored(batch[0].name, NOW + draw.random(), NOW + 100)], NOW + draw.randrange(100))
        if draw.random() < 0.05:
            for part in catalogue.remove([name(first)]):
                log.write("removed", [item.name for item in part])
                catalogue.end_removal([item.name for item in part], 0, CAPACITY)


def remove(catalogue: Catalogue, log: Log, num_bytes: int) -> None:
    gone = [item.name for item in catalogue.evict(Limits(num_bytes, 64), NOW + 50)]
    log.write("removed", gone)
    catalogue.end_removal(gone, num_bytes, CAPACITY)


def read_logs(paths: list[Path]) -> tuple[set[str], set[str]]:
    """Every name that was committed, and that was removed, by anybody."""
    lines = [line.split(" ", 1) for path in paths for line in path.read_text().splitlines(keepends=True)]
    whole = [(verb, rest.rstrip("\n")) for verb, rest in lines if rest.endswith("\n")]
    return {rest for verb, rest in whole if verb == "committed"}, {rest for verb, rest in whole if verb == "removed"}


def text_of(each: Name) -> str:
    return f"{each.fingerprint} {each.object_id.key.hex()} {each.object_id.tag}"


def examine(root: Path, logs: list[Path], tally: Tally) -> None:
    """Assert that nothing is lost or counted wrong, then look after the dead as a living member would."""
    one = Catalogue(str(root))
    one.join([CHUNKS], NOW)
    assert check(one) == []
    assert one.totals().num_bytes <= CAPACITY
    dead = one.dead_members()
    committed, removed = read_logs(logs)
    unlinking = {text_of(item.name) for each in dead for item in each.removals}
    there = {text_of(item.name) for part in one.load([CHUNKS.fingerprint])[1] for item in part}
    assert committed - removed - unlinking <= there
    for each in dead:
        tally.orphan_bytes += each.granted_bytes
        tally.interrupted_removals += len(each.removals)
        assert one.bury(each.slot) == each.granted_bytes + sum(item.num_bytes for item in each.removals)
    assert one.totals().num_bytes == one.totals().object_bytes and check(one) == []
    tally.committed += len(committed)
    one.leave()
    one.close()


def start(root: Path, seed: int, statement: int | None, log: Path) -> BaseProcess:
    process = get_context("fork").Process(target=work_until_killed, args=(root, seed, statement, log))
    process.start()
    return process


def run(root: Path, kills: int, seed: int) -> Tally:
    """Two processes at a time, one killed in a statement that chance chooses, one by the clock."""
    draw = random.Random(seed)
    tally = Tally()
    member(root).close()
    for round_ in range((kills + 1) // 2):
        logs = [root / f"log-{round_}-{which}" for which in range(2)]
        seeds = [draw.randrange(1 << 30) for _ in logs]
        doomed = start(root, seeds[0], draw.randrange(1, 3000), logs[0])
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
