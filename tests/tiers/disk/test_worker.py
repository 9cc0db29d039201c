# SPDX-License-Identifier: Apache-2.0
"""The byte half: what is written is read back, failed calls cost one object, and the end comes in time."""

import errno
import logging
import os
import threading

import pytest
from msgspec.structs import replace

from tests.engine.damage import flip
from tests.tiers.disk.devices import FailingDevice, GatedDevice, RuledDevice, ShortDevice, is_object
from tests.tiers.disk.files import object_files, on_disk, writers_of
from tests.tiers.disk.inside import is_closing, is_writing, room_bytes
from tests.tiers.disk.keys import make_key
from tests.tiers.disk.objects import OBJECT, UNIT, chain
from tests.tiers.disk.tier_pair import TierPair, close_tier, tier_pair
from tests.waiting import until
from vllm_overlay.tiers.base import StoreTicket
from vllm_overlay.tiers.disk import worker as disk_worker
from vllm_overlay.tiers.disk.catalogue import File
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.root import choose_root, takes_direct_io
from vllm_overlay.tiers.disk.files.writer import share_life


@pytest.fixture(params=["checksum", "key"])
def integrity(request, tmp_path) -> dict[str, str]:
    """The settings of a tier without and with a key."""
    return {"encryption_key_file": make_key(tmp_path / "key")} if request.param == "key" else {}


@pytest.mark.parametrize("num_bytes", [1, 15, 16, 4096, UNIT, UNIT + 1, OBJECT, 3 * UNIT])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_objects_read_back_as_written(tmp_path, integrity, num_bytes, direct_io):
    with tier_pair(tmp_path / "root", direct_io=direct_io, max_object_bytes=3 * UNIT, **integrity) as made:
        objects = chain("p", 4, num_bytes)
        made.store(objects)
        assert made.reasons(objects) == [""] * 5


@pytest.mark.parametrize("unit_bytes", [1000, 4096, 5000, 2 * OBJECT])
def test_units_of_any_size_write_what_those_of_any_other_read(tmp_path, integrity, unit_bytes):
    objects = chain("p", 2)
    with tier_pair(tmp_path / "root", unit_bytes=unit_bytes, **integrity) as made:
        made.store(objects)
        assert made.reasons(objects) == [""] * 3
    with tier_pair(tmp_path / "root", **integrity) as again:
        assert again.recovered().reasons(objects) == [""] * 3


def test_short_reads_and_writes_are_continued(tmp_path):
    with tier_pair(tmp_path / "root", device=ShortDevice()) as made:
        made.store(chain("p", 2))
        assert made.reasons(chain("p", 2)) == [""] * 3


def test_without_direct_io_the_page_cache_serves(tmp_path, caplog, said):
    class NoDirect(Device):
        def open(self, path: str, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().open(path, flags)

    caplog.set_level(logging.INFO)
    with tier_pair(tmp_path / "root", device=NoDirect()) as made:
        made.store(chain("p", 1))
        assert made.reasons(chain("p", 1)) == [""] * 2
    assert len(said("no O_DIRECT", logging.INFO)) == 1


def test_direct_io_is_used_where_it_works(tmp_path):
    flags_seen = []

    class Watching(Device):
        def open(self, path: str, flags: int) -> int:
            if threading.current_thread().name.startswith(("disk-read", "disk-write")):
                flags_seen.append(flags)
            return super().open(path, flags)

    if not takes_direct_io(Device(), choose_root(Device(), str(tmp_path / "root"))):
        pytest.skip("this file system has no O_DIRECT")
    with tier_pair(tmp_path / "root", device=Watching()) as made:
        made.store(chain("p", 1))
        made.reasons(chain("p", 1))
    assert len(flags_seen) >= 4 and all(flags & os.O_DIRECT for flags in flags_seen)


def test_an_object_costs_three_calls_to_store_and_three_to_load(tmp_path):
    calls = []
    device = RuledDevice(lambda call, path: calls.append(call) if is_object(path) else None)
    with tier_pair(tmp_path / "root", device=device) as made:
        made.store(chain("first", 1))  # which makes the writer's directory
        made.settled()
        calls.clear()
        planned = chain("p", 1)[0]
        made.store([planned])
        made.settled()
        assert calls == ["open", "pwritev", "close"]
        calls.clear()
        assert made.reasons([planned]) == [""]
        assert calls == ["open", "preadv", "close"]


def test_files_and_directories_are_private(tmp_path):
    previous = os.umask(0)
    try:
        with tier_pair(tmp_path / "root") as made:
            made.store(chain("p", 1))
            modes = {path.stat().st_mode & 0o777 for path in made.root.rglob("*") if path.is_file()}
            directories = {path.stat().st_mode & 0o777 for path in (made.root, *made.root.rglob("*")) if path.is_dir()}
    finally:
        os.umask(previous)
    assert modes == {0o600}
    assert directories == {0o700}


FULL = (errno.ENOSPC, errno.EDQUOT)


@pytest.mark.parametrize("call", ["open", "pwritev", "close"])
@pytest.mark.parametrize("error", [*FULL, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EROFS, errno.EACCES])
def test_a_failed_write_drops_the_store_and_leaves_no_file(tmp_path, call, error):
    device = FailingDevice()
    with tier_pair(tmp_path / "root", device=device, staging_bytes=8 * UNIT) as made:
        made.store(chain("before", 1))
        device.faults[call] = error
        objects = chain("p", 10)
        for _ in range(10):
            assert made.outcome(objects[0]) == ("no_space" if error in FULL else "io_error")
        device.faults.clear()
        assert not made.settled().has(objects[0])
        assert len(object_files(made.root)) == 2
        made.store(objects)
        assert made.reasons(objects + chain("before", 1)) == [""] * 13


def test_one_load_finds_all_that_is_wrong_with_its_files(tmp_path):
    with tier_pair(tmp_path / "root", read_threads=1) as made:
        objects = chain("p", 9)
        made.store(objects)
        rotten = objects[2::3]
        flip([made.path(planned) for planned in rotten])
        worker = made.workers[0]
        worker.begin_load("load", [made.load_ticket(planned) for planned in objects])
        failed = []

        def has_failed() -> bool:
            for result in worker.poll()[1]:
                if result.buffer is None:
                    failed.append((result.object_id, result.is_bad))
                else:
                    worker.end_fetch("load", result.position)
            return bool(failed)

        until(has_failed, "a failure, at which the caller gives the load up")
        assert failed == [(planned.object_id, True) for planned in rotten]


class PanicException(BaseException):
    """As pyo3 raises it when Rust code panics: no Exception."""


@pytest.mark.parametrize("kind", [RuntimeError, PanicException])
def test_an_unexpected_error_in_a_thread_is_a_result_and_the_thread_lives(tmp_path, kind):
    breaks = threading.Event()

    def defect(call, path):
        if breaks.is_set() and is_object(path) and call in ("preadv", "pwritev"):
            raise kind("a defect")

    with tier_pair(tmp_path / "root", device=RuledDevice(defect)) as made:
        objects = chain("p", 2)
        made.store(objects[:1])
        breaks.set()
        for _ in range(8):
            (result,) = made.fetch(objects[:1])
            assert (result.reason, result.is_bad) == ("error", False)
            assert made.outcome(objects[1]) == "error"
        breaks.clear()
        made.store(objects[1:])
        assert made.reasons(objects) == [""] * 3
        assert len(object_files(made.root)) == 3


def test_a_removed_directory_is_a_miss_and_is_made_again(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        planned = chain("p", 1)[0]
        made.store([planned])
        made.path(planned).unlink()
        made.path(planned).parent.rmdir()
        assert made.reasons([planned]) == ["missing"]
        made.tier.drop(planned.object_id)
        made.store([planned])
        assert made.reasons([planned]) == [""]


def test_a_directory_that_goes_before_its_first_file_comes_is_made_again(tmp_path):
    """Whoever evicts removes directories that are empty."""
    going: list[str] = []

    def meanwhile(call: str, path: str) -> None:
        if call == "mkdir" and path.endswith("/0"):
            going.append(path)
        elif call == "open" and is_object(path) and len(going) == 1:
            os.rmdir(going[0])

    with tier_pair(tmp_path / "root", device=RuledDevice(meanwhile)) as made:
        made.store(chain("p", 1)[:1])
    assert len(going) == 2


def test_a_rank_writes_nothing_of_a_writer_that_has_ended(tmp_path):
    """Who buries a writer lists its files, and nobody would look again."""
    planned = chain("p", 1)[0]
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("before", 1))
        made.settled()
        ticket = until(lambda: made.tier.reserve(planned), "room")
        ended = StoreTicket(ticket.ticket, planned, replace(ticket.part, file=File("0" * 16, ticket.part.file.number)))
        (made.root / ("0" * 16) / "0").mkdir(parents=True)  # its burial is under way
        assert made.why_not_written(ended) == "io_error"
        assert writers_of(made.root) == [ticket.part.file.writer]
        made.tier.abort(ticket.ticket)
        made.store([planned])


def test_no_call_of_the_worker_waits_for_a_disk_that_hangs_where_a_writer_is_joined(tmp_path, monkeypatch):
    hangs, may_go, has_answered = threading.Event(), threading.Event(), threading.Event()

    def share(root, writer):
        hangs.set()
        until(may_go.is_set, "the end of the test")
        return share_life(root, writer)

    monkeypatch.setattr(disk_worker, "share_life", share)
    with tier_pair(tmp_path / "root") as made:
        made.submit(made.with_room().tier.reserve(chain("p", 1)[0]))
        until(hangs.is_set, "a write")
        threading.Thread(target=lambda: made.workers[0].poll() and has_answered.set(), daemon=True).start()
        try:
            until(has_answered.is_set, "an answer")
        finally:
            may_go.set()
        assert made.end_of_store() == ""


def test_close_writes_what_is_pending(tmp_path):
    device = GatedDevice("pwritev")
    made = TierPair(tmp_path / "root", device=device, write_threads=1).recovered()
    objects = chain("p", 4)
    until(lambda: room_bytes(made.tier))
    for planned in objects:
        made.submit(made.tier.reserve(planned))
    assert made.workers[0].pending_stores() == 5
    opener = threading.Thread(target=lambda: until(lambda: is_closing(made.workers[0])) and device.gate.set())
    opener.start()
    assert made.close() == 0
    opener.join()
    assert [path.stat().st_size for path in object_files(made.root)] == [on_disk()] * 5
    with tier_pair(tmp_path / "root") as again:  # nobody has told the catalogue of them
        again.recovered()
        until(lambda: object_files(again.root) == [], "their burial")


def test_close_gives_up_in_time(tmp_path):
    device = GatedDevice("pwritev")
    made = TierPair(tmp_path / "root", device=device, write_threads=1).recovered()
    objects = chain("p", 2)
    until(lambda: room_bytes(made.tier))
    for planned in objects:
        ticket = made.submit(made.tier.reserve(planned))
    device.await_call()
    assert made.workers[0].close(0.05) == 3
    device.gate.set()
    until(lambda: not is_writing(made.workers[0]))
    assert len(object_files(made.root)) == 1  # it was being written
    assert made.workers[0].begin_store(ticket) is None
    assert made.reasons(objects) == ["closed"] * 3
    close_tier(made.tier)
