# SPDX-License-Identifier: Apache-2.0
"""The processes of the crash test: one that stores until it is killed, and one that examines what it left."""

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from tests.tiers.disk.files import bytes_under, counted, object_files, on_disk
from tests.tiers.disk.inside import end_transactions_with
from tests.tiers.disk.objects import OBJECT, chain, content, fill
from tests.tiers.disk.oracle import file_at, problems
from tests.tiers.disk.tier_pair import NAMESPACE, NOWHERE, TierPair
from tests.tiers.entries import entries_of
from tests.tiers.integrity import check_integrity
from tests.waiting import until
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import StoreTicket
from vllm_overlay.tiers.disk import bookkeeper
from vllm_overlay.tiers.disk.catalogue import Catalogue, Committed, File, StoredObject
from vllm_overlay.tiers.disk.files.device import Device

RANKS = 2
CAPACITY = 60 * RANKS * on_disk()
SETTINGS = {"write_threads": 2, "read_threads": 2, "capacity_bytes": CAPACITY}
_EXPECTED = 0.5
"""What was committed last, up to this share of the limit, must be served after the kill: the rest is held as room for
stores, or went to make some. That is so where last use decides; a ranking may think little of what is new."""


@dataclass(slots=True)
class Tally:
    """Sums over all kills; what has a limit of 0 must stay 0."""

    kills: int = 0
    by_call: int = 0
    objects_read: int = 0
    expected_objects: int = 0
    lost_objects: int = 0
    wrong_objects: int = 0
    unreadable_starts: int = 0
    leftovers: int = 0
    most_bytes: int = 0
    over_limit: int = 0
    problems: int = 0

    def add(self, other: "Tally") -> None:
        for field in fields(self):
            join = max if field.name.startswith("most") else lambda one, two: one + two
            setattr(self, field.name, join(getattr(self, field.name), getattr(other, field.name)))

    @property
    def is_sound(self) -> bool:
        bad = (self.wrong_objects, self.unreadable_starts, self.leftovers, self.over_limit, self.problems)
        is_kept = self.lost_objects <= max(3, 0.01 * self.expected_objects)
        return not any(bad) and is_kept


class KillingDevice(Device):
    """Ends the process in the ``count``-th call of one kind, whichever thread makes it."""

    def __init__(self, call: str, when: str, count: int) -> None:
        self._call, self._when, self._left = call, when, count

    def commit(self, db: sqlite3.Connection) -> None:
        """A transaction of the catalogue, which makes its calls on files itself."""
        self._around("commit", lambda: db.execute("COMMIT"))

    def _around(self, call: str, do: Callable[[], Any]) -> Any:
        self._left -= call == self._call
        is_due = call == self._call and self._left <= 0
        if is_due and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = do()
        if is_due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def open(self, path: str, flags: int) -> int:
        return self._around("open", lambda: Device.open(self, path, flags))

    def pwritev(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        written = segments[: max(1, len(segments) // 2)] if self._when == "half" else segments
        return self._around("pwritev", lambda: Device.pwritev(self, fd, written, offset))

    def unlink(self, path: str) -> None:
        self._around("unlink", lambda: Device.unlink(self, path))

    def mkdir(self, path: str) -> None:
        self._around("mkdir", lambda: Device.mkdir(self, path))

    def lstat(self, path: str) -> os.stat_result:
        return self._around("lstat", lambda: Device.lstat(self, path))


class Diary:
    """What the catalogue has answered that it has taken, and must be found after the process's end: a line each, in a
    file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def follow(self) -> None:
        """Write down what any catalogue of this process takes."""
        commit = Catalogue.commit

        def commit_and_write(
            catalogue: Catalogue, writer: str, batch: Iterable[tuple[StoredObject, File | None]]
        ) -> list[Committed | None]:
            items = list(batch)
            answers = commit(catalogue, writer, items)
            for (item, _), answer in zip(items, answers, strict=True):
                if isinstance(answer, Committed):
                    self._write("+", *map(_own, (item.object_id, *item.planned.parents)))
            return answers

        Catalogue.commit = commit_and_write  # type: ignore[method-assign]

    def cleared(self) -> None:
        self._write("0")

    def _write(self, what: str, *object_ids: ObjectId) -> None:
        os.write(self._fd, " ".join([what, *(f"{each.tag}:{each.key.hex()}" for each in object_ids)]).encode() + b"\n")


def _own(stored: ObjectId) -> ObjectId:
    own = NAMESPACE.own_id(stored)
    assert own is not None
    return own


def last_committed(path: Path, count: int) -> list[ObjectId]:
    """At most ``count`` objects of a diary, with what they depend on and without what came after a reset."""
    parents: dict[ObjectId, list[ObjectId]] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        what, *names = line.split()
        if what == "0":
            return []  # what comes after it goes with the process, and what was before goes first
        object_id, *below = [ObjectId(tag, bytes.fromhex(key)) for tag, key in (name.split(":") for name in names)]
        parents.pop(object_id, None)
        parents[object_id] = below
    found: dict[ObjectId, None] = {}
    for object_id in reversed(parents):
        path_down = [object_id]
        while path_down:
            each = path_down.pop()
            if each not in found:
                found[each] = None
                path_down += parents.get(each, [])
        if len(found) >= count:
            break
    return list(found)[:count]


class Storer:
    """Keeps several stores in flight in every rank, as an engine's steps do."""

    def __init__(self, root: Path, seed: int, device: Device | None, diary: Path) -> None:
        self._diary = Diary(diary)
        self._diary.follow()
        if isinstance(device, KillingDevice):
            end_transactions_with(device.commit)
        self._random = random.Random(seed)
        self._pair = TierPair(root, RANKS, device=device, **SETTINGS)
        self._missing: dict[int, int] = {}
        self._failed: set[int] = set()

    def run(self) -> None:
        """Until killed."""
        tier = self._pair.tier
        while True:
            tier.advance()
            objects = chain(f"p{self._random.randrange(300)}", self._random.randrange(1, 9))
            for planned in objects:
                ticket = tier.reserve(planned)
                if ticket is not None:
                    self._submit(ticket, planned)
            self._poll()
            if self._random.random() < 0.02:
                tier.drop(self._random.choice(objects).object_id)
            if self._random.random() < 0.002:
                self._diary.cleared()
                tier.clear()
            check_integrity(tier.index)
            time.sleep(0.001)

    def _submit(self, ticket: StoreTicket, planned: PlannedObject) -> None:
        workers = self._pair.workers
        buffers = [worker.begin_store(ticket) for worker in workers]
        if None in buffers:
            for worker, buffer in zip(workers, buffers, strict=True):
                if buffer is not None:
                    worker.cancel_store(ticket, buffer)
            self._pair.tier.abort(ticket.ticket)
            return
        self._missing[ticket.ticket] = RANKS
        for rank, (worker, buffer) in enumerate(zip(workers, buffers, strict=True)):
            assert buffer is not None
            fill(buffer, content(planned, rank))
            worker.submit_store(ticket, buffer)

    def _poll(self) -> None:
        for worker in self._pair.workers:
            for result in worker.poll()[0]:
                self._missing[result.ticket] -= 1
                if result.reason:
                    self._failed.add(result.ticket)
                if not self._missing[result.ticket]:
                    del self._missing[result.ticket]
                    self._end(result.ticket)

    def _end(self, ticket: int) -> None:
        if ticket in self._failed:
            return self._pair.tier.abort(ticket)
        self._pair.tier.commit(ticket)


def store_until_killed(root: Path, seed: int, kill: tuple[str, str, int] | None, has_begun: Event, diary: Path) -> None:
    """The process to be killed."""
    has_begun.set()
    Storer(root, seed, KillingDevice(*kill) if kill else None, diary).run()


def examine(root: Path, answer: Connection, diary: Path) -> None:
    """The process that recovers and reads everything."""
    tally = Tally(most_bytes=bytes_under(root))
    tally.over_limit = int(tally.most_bytes > CAPACITY)
    bookkeeper.TICK_S = 0.05
    try:
        made = TierPair(root, RANKS, **SETTINGS).recovered()
        until(lambda: made.tier.advance() or counted(root)[0] == bytes_under(root))
        made.settled()
    except AssertionError:
        tally.leftovers = 1
    except BaseException:
        tally.unreadable_starts = 1
        answer.send(tally)
        raise
    check_integrity(made.tier.index)
    objects = [PlannedObject(object_id, (), 0, 64, OBJECT) for object_id in entries_of(made.tier.index)]
    expected = last_committed(diary, int(_EXPECTED * CAPACITY / (RANKS * on_disk())))
    tally.expected_objects = len(expected)
    tally.lost_objects = sum(not made.tier.index.has(object_id) for object_id in expected)
    names = [planned for turn in range(300) for planned in chain(f"p{turn}", 1)]
    there = [*filter(None, map(file_at, object_files(root))), NOWHERE]
    for rank in range(RANKS):
        try:
            tally.wrong_objects += sum(reason != "" for reason in made.reasons(objects, rank))
            for planned in (asked := random.sample(names, 20)):  # whatever the index says: what is loaded is right
                made.pretend(planned, random.choice(there))
            made.reasons(asked, rank)
        except AssertionError:
            tally.wrong_objects += 1
    tally.objects_read = len(objects)
    made.close()
    tally.problems = len(problems(root, CAPACITY))
    answer.send(tally)
