# SPDX-License-Identifier: Apache-2.0
"""Stores over the files of evicted objects."""

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tiers.disk.devices import FailingDevice
from tests.tiers.disk.files import bytes_of_objects, bytes_under, on_disk, temporaries
from tests.tiers.disk.inside import begin_closing, mark_closed, stop_readers, stores_in_flight_bytes
from tests.tiers.disk.objects import OBJECT, UNIT, chain
from tests.tiers.disk.tier_pair import OTHER_NAMESPACE, TierPair, tier_pair
from tests.tiers.disk.waiting import until
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import StoreTicket
from vllm_overlay.tiers.disk.device import Device
from vllm_overlay.tiers.disk.ledger import Ledger

RANKS = 2
CAPACITY = 128 * RANKS * on_disk()
"""A batch is four objects then, and up to two objects' files are spares."""


@contextmanager
def full_tier(root: Path, **changes: object) -> Iterator[TierPair]:
    """A tier that evicts for each store and has spares now."""
    with tier_pair(root, world_size=RANKS, **{"capacity_bytes": CAPACITY, **changes}) as made:
        for turn in range(32):
            made.store(chain(f"old {turn}", 4))
        wait_for_spares(made)
        yield made


def wait_for_spares(made: TierPair, at_least: int = RANKS) -> None:
    until(lambda: made.tier.advance() or len(made.recycled()) >= at_least, "spares")


def inodes(paths: list[Path]) -> set[int]:
    return {path.stat().st_ino for path in paths}


def store_anew(made: TierPair, name: str) -> list[Path]:
    """Stores one chunk; its files."""
    (chunk, _) = chain(name, 1)
    made.store([chunk])
    return [made.path(chunk, rank) for rank in range(RANKS)]


def ticket_for(made: TierPair, planned: PlannedObject) -> StoreTicket:
    tickets: list[StoreTicket | None] = []
    until(lambda: made.tier.advance() or tickets.append(made.tier.reserve(planned)) or tickets[-1], "room")
    ticket = tickets[-1]
    assert ticket is not None
    return ticket


def verify(made: TierPair, name: str) -> bool:
    return all(made.reasons(chain(name, 1)[:1], rank) == [""] for rank in range(RANKS))


def test_a_full_tier_stores_over_what_it_evicted(tmp_path, monkeypatch):
    with full_tier(tmp_path / "root") as made:
        promised: list[set[int]] = []
        reserve = made.tier.reserve

        def watched(planned: PlannedObject) -> StoreTicket | None:
            ticket = reserve(planned)
            if ticket is not None and planned.object_id.tag == "f0":
                promised.append(inodes([Path(path) for path in ticket.part.over]))
            return ticket

        monkeypatch.setattr(made.tier, "reserve", watched)
        for turn in range(6):
            files = store_anew(made, f"new {turn}")
            assert inodes(files) == promised[-1]
            assert verify(made, f"new {turn}")
            wait_for_spares(made)
        assert bytes_under(made.root) <= CAPACITY
        with Ledger(str(made.root), Device()).locked() as state:
            assert state.file_bytes == bytes_of_objects(made.root)
            assert state.file_bytes + sum(state.leases) <= CAPACITY
            assert sum(state.leases) >= sum(path.stat().st_size for path in made.recycled())
    assert temporaries(made.root) == []


def test_an_object_of_another_size_gets_a_new_file_at_once(tmp_path):
    with full_tier(tmp_path / "root") as made:
        spares = inodes(made.recycled())
        chunk = chain("small", 1, num_bytes=OBJECT // 2)[0]
        made.store([chunk])
        assert not spares & inodes([made.path(chunk, rank) for rank in range(RANKS)])
        assert inodes(made.recycled()) >= spares


def test_while_another_process_uses_the_root_evicted_files_are_unlinked(tmp_path):
    """It may be reading them."""
    with (
        full_tier(tmp_path / "root") as made,
        tier_pair(tmp_path / "root", namespace=OTHER_NAMESPACE, capacity_bytes=CAPACITY) as other,
    ):
        other.recovered()
        until(lambda: Ledger(str(made.root), Device()).count_processes() == 2)
        for turn in range(4):
            made.store(chain(f"uses up what there is {turn}", 1))
        assert made.recycled() == []
        for turn in range(4):
            (chunk, _) = chain(f"new {turn}", 1)
            ticket = ticket_for(made, chunk)
            assert made.recycled() == [] and ticket.part.over == ()
            made.tier.abort(ticket.ticket)
            store_anew(made, f"new {turn}")


def unlink(path: Path) -> None:
    path.unlink()


def replace_by_link(path: Path) -> None:
    target = path.with_name("not ours")
    path.rename(target)
    path.symlink_to(target)


def make_second_name(path: Path) -> None:
    os.link(path, path.with_name("not ours"))


def lengthen(path: Path) -> None:
    os.truncate(path, 2 * on_disk())


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
    os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # or nobody could write to it; open until the tests end


@pytest.mark.parametrize("change", [unlink, replace_by_link, make_second_name, lengthen, replace_by_pipe])
def test_what_is_no_spare_any_more_is_not_written_over(tmp_path, change: Callable[[Path], None]):
    with full_tier(tmp_path / "root") as made:
        for spare in made.recycled():
            if not (spare.parent / "not ours").exists():
                change(spare)
        strangers = {path: path.read_bytes() for path in made.root.rglob("not ours")}
        for name in ("p", "q"):
            files = store_anew(made, name)
            assert all(path.is_file() and not path.is_symlink() for path in files)
            assert verify(made, name)
        assert {path: path.read_bytes() for path in strangers} == strangers
        for path in strangers:
            path.unlink()
    assert temporaries(made.root) == []


def test_a_store_that_ends_early_leaves_no_spare_and_gives_its_room_back(tmp_path):
    with full_tier(tmp_path / "root") as made:
        (chunk, _) = chain("p", 1)
        ticket = ticket_for(made, chunk)
        assert len(ticket.part.over) == RANKS
        made.tier.abort(ticket.ticket)  # as when a rank has no staging room
        until(lambda: not any(os.path.exists(path) for path in ticket.part.over))
        until(lambda: made.tier.advance() or stores_in_flight_bytes(made.tier) == 0)
        for turn in range(10):
            made.store(chain(f"new {turn}", 1))
            assert bytes_under(made.root) <= CAPACITY


def test_a_write_over_a_spare_that_fails_leaves_nothing(tmp_path):
    device = FailingDevice()
    with full_tier(tmp_path / "root", device=device) as made:
        device.faults = {"pwritev": errno.EIO}
        assert made.try_store(chain("p", 1)[0]) == "io_error"
        device.faults = {}
        until(lambda: temporaries(made.root) == made.recycled())
        store_anew(made, "q")
        assert verify(made, "q")


class FillingDevice(FailingDevice):
    """A file system with so many bytes free."""

    free = 1 << 40
    num_asked = 0

    def free_bytes(self, path: str) -> int:
        self.num_asked += 1
        return self.free


def test_spares_go_when_the_file_system_runs_full(tmp_path):
    device = FillingDevice()
    with full_tier(tmp_path / "root", device=device, min_free_bytes="1 GiB") as made:
        device.free = 1 << 20
        until(lambda: made.tier.advance() or (made.recycled() == [] and temporaries(made.root) == []))
        assert made.try_store(chain("q", 1)[0]) == "no_room"
        device.free = 1 << 40
        store_anew(made, "q")


def test_spares_take_no_room_twice(tmp_path):
    device = FillingDevice()
    with full_tier(tmp_path / "root", device=device, min_free_bytes="1 GiB") as made:
        spares = made.recycled()
        with Ledger(str(made.root), Device()).locked() as state:
            still_to_come = sum(state.leases) - len(spares) * on_disk()
        device.free = (1 << 30) + still_to_come
        asked = device.num_asked
        until(lambda: device.num_asked > asked + 2)
        assert set(spares) <= set(made.recycled())  # the last eviction may have left some more


def test_nothing_is_written_over_that_is_loaded(tmp_path):
    with full_tier(tmp_path / "root") as made:
        held: list[PlannedObject] = [item for turn in range(32) for item in chain(f"old {turn}", 4) if made.has(item)]
        held = held[:10]
        assert made.tier.acquire(held) is not None
        for turn in range(100):
            made.store(chain(f"new {turn}", 1))
        assert made.reasons(held) == [""] * len(held)
        made.tier.release([item.object_id for item in held])


class NoRename(Device):
    """Files cannot get the name of a spare: of each ``nth`` only."""

    nth = 0
    _num_renames = 0

    def rename(self, source: str, target: str) -> None:
        if self.nth and os.path.basename(target).startswith(".tmp."):
            self._num_renames += 1
            if self._num_renames % self.nth == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().rename(source, target)


@pytest.mark.parametrize("nth", [1, RANKS])
def test_where_files_cannot_be_kept_they_are_unlinked(tmp_path, nth: int):
    device = NoRename()
    with full_tier(tmp_path / "root", device=device) as made:
        device.nth = nth
        for turn in range(30):
            store_anew(made, f"new {turn}")
            assert bytes_under(made.root) <= CAPACITY
        until(lambda: temporaries(made.root) == made.recycled())


def test_where_the_ledger_cannot_be_written_evicted_files_are_unlinked(tmp_path, monkeypatch):
    with full_tier(tmp_path / "root") as made:
        retire = Ledger.retire

        def failing(self, *arguments):
            retire(self, *arguments)
            raise OSError(errno.ENOSPC, "the ledger")

        monkeypatch.setattr(Ledger, "retire", failing)
        for turn in range(30):
            store_anew(made, f"new {turn}")
            assert bytes_under(made.root) <= CAPACITY
        until(lambda: temporaries(made.root) == made.recycled())


@pytest.mark.parametrize("batch", [2.0, 2.1])
def test_spares_of_other_sizes_never_take_all_the_room(tmp_path, batch: float):
    """Snapshots are evicted first, so they are what spares are made of; chunks need room beside them."""
    largest, chunk_bytes = 24 * UNIT - 4096, 12 * UNIT
    sizes = (largest - 8192, largest)

    def snapshot(chunk: PlannedObject, number: int) -> PlannedObject:
        name = ObjectId("s", f"snapshot {number}".encode())
        return PlannedObject(name, (chunk.object_id,), 64, 64, sizes[number % 2])

    with tier_pair(
        tmp_path / "root",
        capacity_bytes=int(32 * batch * on_disk(largest)),
        max_object_bytes=largest,
        staging_bytes=400 * UNIT,
    ) as made:
        common = chain("common", 1, chunk_bytes)[0]
        made.store([common])
        number = 0
        while made.tier.usage().evicted_objects < 4:
            made.outcome(snapshot(common, number := number + 1))
        wait_for_spares(made, 1)
        made.store([chain(f"new {turn}", 1, chunk_bytes)[0] for turn in range(20)])


def test_a_lost_lease_leaves_no_spare(tmp_path):
    with full_tier(tmp_path / "root") as made:
        spares = made.recycled()
        shutil.rmtree(made.root / "leases")
        until(lambda: not any(path.exists() for path in spares))
        made.recovered()
        store_anew(made, "new")
    assert temporaries(made.root) == []


class SlowReader(Device):
    """Reads a page and waits for the rest."""

    def __init__(self) -> None:
        self.holds = False
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def preadv(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        if not self.holds or not threading.current_thread().name.startswith("disk-read-r"):
            return super().preadv(fd, segments, offset)
        num_read = super().preadv(fd, segments[:1], offset)
        self.has_begun.set()
        assert self.may_go_on.wait(30)
        return num_read


def test_a_read_that_was_given_up_removes_nothing_that_came_after_it(tmp_path, caplog):
    device = SlowReader()
    with tier_pair(tmp_path / "root", device=device, capacity_bytes=128 * on_disk()) as made:
        victim = chain("victim", 1)[0]
        made.store([victim])
        file = made.path(victim).stat().st_ino
        tickets = made.tier.acquire([victim])
        assert tickets is not None
        device.holds = True
        made.workers[0].begin_load("slow", tickets)
        assert device.has_begun.wait(10)
        device.holds = False
        made.workers[0].cancel_load("slow")
        made.tier.release([victim.object_id])
        written_over = False
        for turn in range(600):
            (chunk, _) = chain(f"new {turn}", 1)
            made.store([chunk])
            written_over = made.path(chunk).stat().st_ino == file
            if written_over:
                break
        assert written_over
        made.store([victim])
        device.may_go_on.set()
        stop_readers(made.workers[0], 10.0)
        assert made.path(victim).exists() and made.has(victim)
        assert not any("was not loaded" in message for message in caplog.messages)


def test_a_worker_that_closes_leaves_no_spare(tmp_path):
    made = TierPair(tmp_path / "root", world_size=RANKS, capacity_bytes=CAPACITY)
    for turn in range(32):
        made.store(chain(f"old {turn}", 4))
    wait_for_spares(made)
    chunk = chain("p", 1)[0]
    ticket = ticket_for(made, chunk)
    assert ticket.part.over
    for worker in made.workers:
        buffer = worker.begin_store(ticket)
        assert buffer is not None
        mark_closed(worker)
        worker.submit_store(ticket, buffer)
        until(lambda worker=worker: worker.poll()[0])
    assert not any(os.path.exists(path) for path in ticket.part.over)
    made.tier.abort(ticket.ticket)
    made.close()
    assert temporaries(made.root) == []


def test_a_store_that_is_given_back_while_the_tier_closes_leaves_no_spare(tmp_path):
    with full_tier(tmp_path / "root") as made:
        ticket = ticket_for(made, chain("p", 1)[0])
        assert ticket.part.over
        begin_closing(made.tier)
        made.tier.abort(ticket.ticket)
    assert temporaries(made.root) == []
