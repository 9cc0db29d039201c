# SPDX-License-Identifier: Apache-2.0
"""The byte half: what is written is read back, and nothing else ever is."""

import errno
import os
import threading

import numpy as np
import pytest

from tests.tiers.disk.engine import (
    NAMESPACE,
    OBJECT,
    UNIT,
    Engine,
    FailingDevice,
    ShortDevice,
    chain,
    content,
    engine,
    fill,
    object_files,
    settings,
    temporaries,
    until,
)
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.base import LoadTicket, StoreTicket
from vllm_overlay.tiers.disk import ledger
from vllm_overlay.tiers.disk import worker as disk_worker
from vllm_overlay.tiers.disk.device import Device, takes_direct_io
from vllm_overlay.tiers.disk.worker import DiskTierWorker


@pytest.mark.parametrize("num_bytes", [1, 4096, UNIT, UNIT + 1, OBJECT, 3 * UNIT])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_objects_read_back_as_written(tmp_path, num_bytes, direct_io):
    with engine(tmp_path / "root", direct_io=direct_io, max_object_bytes=3 * UNIT) as made:
        objects = chain("p", 4, num_bytes)
        made.store(objects)
        assert made.reasons(objects) == [""] * 5


@pytest.mark.parametrize("unit_bytes", [1000, 4096, 5000, 2 * OBJECT])
def test_any_unit_size_gives_the_same_files(tmp_path, unit_bytes):
    objects = chain("p", 2)
    with engine(tmp_path / "a") as one, engine(tmp_path / "b", unit_bytes=unit_bytes) as other:
        one.store(objects)
        other.store(objects)
        assert other.reasons(objects) == [""] * 3
        for planned in objects:
            assert one.path(planned).read_bytes()[4096:] == other.path(planned).read_bytes()[4096:]


def test_short_reads_and_writes_are_continued(tmp_path):
    with engine(tmp_path / "root", device=ShortDevice()) as made:
        made.store(chain("p", 2))
        assert made.reasons(chain("p", 2)) == [""] * 3


def test_without_direct_io_the_page_cache_serves(tmp_path, caplog):
    class NoDirect(Device):
        def open(self, path: str, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super().open(path, flags)

    caplog.set_level("INFO")
    with engine(tmp_path / "root", device=NoDirect()) as made:
        made.store(chain("p", 1))
        assert made.reasons(chain("p", 1)) == [""] * 2
    assert sum("no O_DIRECT" in message for message in caplog.messages) == 1


def test_direct_io_is_used_where_it_works(tmp_path):
    flags_seen = []

    class Watching(Device):
        def open(self, path: str, flags: int) -> int:
            flags_seen.append((os.path.basename(path), flags))
            return super().open(path, flags)

    if not takes_direct_io(Device(), str(tmp_path)):
        pytest.skip("this file system has no O_DIRECT")
    with engine(tmp_path / "root", device=Watching()) as made:
        made.store(chain("p", 1))
        made.reasons(chain("p", 1))
        name = made.path(chain("p", 1)[0]).name
    assert all(flags & os.O_DIRECT for seen, flags in flags_seen if seen == name)
    assert any(seen == name for seen, _ in flags_seen)


def test_files_and_directories_are_private(tmp_path):
    previous = os.umask(0)
    try:
        with engine(tmp_path / "root") as made:
            made.store(chain("p", 1))
            modes = {path.stat().st_mode & 0o777 for path in made.root.rglob("*") if path.is_file()}
            directories = {path.stat().st_mode & 0o777 for path in (made.root, *made.root.rglob("*")) if path.is_dir()}
    finally:
        os.umask(previous)
    assert modes == {0o600}
    assert directories == {0o700}


# What does not verify.


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


HEADER_FIELDS = [0, 8, 12, 16, 24, 32, 40, 48, 52, 56, 57, 64, 96, 128, 129, 136, 144, 208, 224, 900, 4064, 4080]
PAYLOAD = {"start": 4096, "middle": 4096 + OBJECT // 2, "end": 4096 + OBJECT - 1}
PADDING = {"start": 4096 + OBJECT, "end": 4096 + 3 * UNIT - 1}


@pytest.mark.parametrize("offset", HEADER_FIELDS)
def test_a_flipped_header_field_is_a_miss_and_the_file_is_removed(tmp_path, offset):
    check_flipped(tmp_path, offset, "header")


@pytest.mark.parametrize("offset", [*PAYLOAD.values(), *PADDING.values()])
def test_a_flipped_payload_or_padding_byte_is_a_miss_and_the_file_is_removed(tmp_path, offset):
    check_flipped(tmp_path, offset, "checksum")


def check_flipped(tmp_path, offset, reason):
    planned = chain("p", 2)[1]
    with engine(tmp_path / "root") as made:
        made.store(chain("p", 2))
        flip(made.path(planned), offset)
        (result,) = made.fetch([planned])
        assert (result.reason, result.is_bad, result.buffer) == (reason, True, None)
        assert not made.path(planned).exists()
        assert made.reasons([planned]) == ["missing"]


@pytest.mark.parametrize("size", [0, 100, 4096, 8192, 4096 + 3 * UNIT - 1, 4096 + 3 * UNIT + 1, 4096 + 4 * UNIT])
def test_a_truncated_or_extended_file_is_a_miss_and_is_removed(tmp_path, size):
    planned = chain("p", 1)[0]
    with engine(tmp_path / "root") as made:
        made.store([planned])
        os.truncate(made.path(planned), size)
        (result,) = made.fetch([planned])
        assert (result.reason, result.is_bad) == ("size", True)
        assert not made.path(planned).exists()


def test_the_file_of_another_key_is_a_miss(tmp_path):
    with engine(tmp_path / "root") as made:
        one, two = chain("p", 2)[:2]
        made.store([one, two])
        os.replace(made.path(one), made.path(two))
        assert made.reasons([one, two]) == ["missing", "header"]


def test_the_file_of_another_rank_or_namespace_is_a_miss(tmp_path):
    planned = chain("p", 1)[0]
    with engine(tmp_path / "root", world_size=2) as made:
        made.store([planned])
        os.replace(made.path(planned, 1), made.path(planned, 0))
        assert made.reasons([planned], rank=0) == ["header"]
    with engine(tmp_path / "a") as one, engine(tmp_path / "b", world_size=2) as two:
        one.store([planned])
        two.store([planned])
        os.replace(one.path(planned), two.path(planned))
        assert two.reasons([planned]) == ["header"]


def test_an_object_of_another_size_is_a_miss(tmp_path):
    with engine(tmp_path / "root") as made:
        made.store(chain("p", 1, OBJECT))
        assert made.reasons(chain("p", 1, OBJECT - 1)) == ["header", "header"]
        assert made.reasons(chain("p", 1, UNIT)) == ["missing", "missing"]


def test_a_symlink_in_place_of_an_object_is_not_followed(tmp_path):
    planned = chain("p", 1)[0]
    with engine(tmp_path / "root") as made:
        made.store([planned])
        target = tmp_path / "elsewhere"
        made.path(planned).rename(target)
        made.path(planned).symlink_to(target)
        assert made.reasons([planned]) == ["header"]
        assert not made.path(planned).is_symlink()
        assert target.exists()


@pytest.mark.parametrize(("direct_io", "reason"), [("auto", "io_error"), ("off", "header")])
def test_a_pipe_or_a_directory_in_place_of_an_object_holds_nobody(tmp_path, direct_io, reason):
    if direct_io == "auto" and not takes_direct_io(Device(), str(tmp_path)):
        pytest.skip("this file system has no O_DIRECT")
    one, two = chain("p", 2)[:2]
    with engine(tmp_path / "root", direct_io=direct_io) as made:
        made.store([one, two])
        made.path(one).unlink()
        os.mkfifo(made.path(one))
        made.path(two).unlink()
        made.path(two).mkdir()
        assert made.reasons([one, two]) == [reason, reason]


# Staging.


def test_a_load_larger_than_the_staging_comes_in_pieces(tmp_path):
    with engine(tmp_path / "root", staging_bytes=8 * UNIT) as made:
        objects = chain("p", 20)
        made.store(objects)
        assert made.reasons(objects) == [""] * 21


def test_two_loads_larger_than_the_staging_both_end(tmp_path):
    with engine(tmp_path / "root", staging_bytes=8 * UNIT) as made:
        objects = chain("p", 10)
        made.store(objects)
        worker = made.workers[0]
        tickets = [LoadTicket(0, planned.object_id, planned.num_bytes) for planned in objects]
        worker.begin_load("one", tickets)
        worker.begin_load("two", tickets)
        ended = []

        def poll():
            for result in worker.poll()[1]:
                assert result.reason is None
                worker.end_fetch(result.load_id, result.position)
                ended.append((result.load_id, result.position))
            return len(ended) == 22

        until(poll)
        assert len(set(ended)) == 22


def test_stores_leave_staging_for_loads(tmp_path):
    with engine(tmp_path / "root", staging_bytes=8 * UNIT) as made:
        objects = chain("p", 6)
        made.store(objects[:1])
        tickets = [made.tier.reserve(planned) for planned in objects[1:]]
        buffers = [made.workers[0].begin_store(ticket) for ticket in tickets]
        assert [buffer is not None for buffer in buffers] == [True, False, False, False, False, False]
        assert made.reasons(objects[:1]) == [""]


def test_no_store_is_taken_when_too_many_are_pending(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_worker, "MAX_PENDING_STORES", 0)
    with engine(tmp_path / "root") as made:
        made.recovered()
        until(lambda: made.tier.reserve(chain("x", 1)[0]))
        assert made.workers[0].begin_store(StoreTicket(256, chain("p", 1)[0].object_id, (), 0, 64, OBJECT)) is None


def test_an_object_larger_than_promised_is_refused_and_not_blamed(tmp_path):
    with engine(tmp_path / "root") as made:
        (result, *_) = made.fetch(chain("p", 1, OBJECT + 1))
        assert (result.reason, result.is_bad) == ("too_large", False)


def test_a_staging_too_small_for_the_largest_object_is_refused_with_a_size_that_works(tmp_path):
    with pytest.raises(ConfigError, match="staging_bytes") as refusal:
        engine_settings = settings(tmp_path, staging_bytes=5 * UNIT)
        DiskTierWorker(engine_settings, NAMESPACE, 0, 1, UNIT, OBJECT)
    works = int(str(refusal.value).split()[-1])
    DiskTierWorker(settings(tmp_path, staging_bytes=works), NAMESPACE, 0, 1, UNIT, OBJECT).close(1.0)


class GatedDevice(Device):
    """Reads or writes wait until the test opens the gate."""

    def __init__(self, call):
        self.call = call
        self.gate = threading.Event()
        self.waiting = threading.Semaphore(0)

    def _pass(self, call, segments):
        if call == self.call and len(segments) > 1:  # an object's, not a probe's
            self.waiting.release()
            assert self.gate.wait(20)

    def preadv(self, fd, segments, offset):
        self._pass("preadv", segments)
        return super().preadv(fd, segments, offset)

    def pwritev(self, fd, segments, offset):
        self._pass("pwritev", segments)
        return super().pwritev(fd, segments, offset)


def staging_is_free(worker, num_units):
    """Whether every unit can be had again."""
    with worker._lock:
        units = worker._staging._free.num_free
    return units == num_units


def test_cancelling_a_load_frees_its_staging(tmp_path):
    device = GatedDevice("preadv")
    with engine(tmp_path / "root", device=device, staging_bytes=8 * UNIT, read_threads=1) as made:
        objects = chain("p", 5)
        made.store(objects)
        worker = made.workers[0]
        worker.begin_load("gone", [LoadTicket(0, planned.object_id, planned.num_bytes) for planned in objects])
        device.waiting.acquire()  # one is being read, one is queued, the others wait for room
        worker.cancel_load("gone")
        device.gate.set()
        until(lambda: staging_is_free(worker, 8))
        assert worker.poll() == ([], [])
        assert made.reasons(objects) == [""] * 6


def test_cancelling_a_load_takes_back_what_was_fetched_and_not_ended(tmp_path):
    with engine(tmp_path / "root", staging_bytes=8 * UNIT) as made:
        objects = chain("p", 5)
        made.store(objects)
        worker = made.workers[0]
        tickets = [LoadTicket(0, planned.object_id, planned.num_bytes) for planned in objects]
        worker.begin_load("polled", tickets)
        polled = []
        until(lambda: polled.extend(worker.poll()[1]) or len(polled) == 2)
        worker.cancel_load("polled")
        worker.begin_load("polled", tickets)  # the name may be used again
        until(lambda: len(worker._fetched) == 2)
        worker.cancel_load("polled")
        until(lambda: staging_is_free(worker, 8))
        assert worker.poll() == ([], [])


def test_a_cancelled_store_gives_its_buffer_back(tmp_path):
    with engine(tmp_path / "root", staging_bytes=8 * UNIT) as made:
        ticket = StoreTicket(256, chain("p", 1)[0].object_id, (), 0, 64, OBJECT)
        for _ in range(20):
            made.workers[0].cancel_store(ticket, made.workers[0].begin_store(ticket))
        assert made.workers[0].pending_stores() == 0


# Faults.


@pytest.mark.parametrize("call", ["pwritev", "rename", "open"])
@pytest.mark.parametrize(("error", "reason"), [(errno.ENOSPC, "no_space"), (errno.EIO, "io_error")])
def test_a_failed_write_drops_the_store_and_leaves_no_file(tmp_path, call, error, reason):
    device = FailingDevice()
    with engine(tmp_path / "root", device=device, staging_bytes=8 * UNIT) as made:
        made.store(chain("before", 1))
        device.faults[call] = error
        objects = chain("p", 10)
        for _ in range(10):
            assert made.outcome(objects[0]) == reason
        device.faults.clear()
        assert not made.has(objects[0])
        assert len(object_files(made.root)) == 2
        assert temporaries(made.root) == []
        made.store(objects)
        assert made.reasons(objects) == [""] * 11


def test_a_failed_read_is_a_miss_and_the_tier_lives(tmp_path):
    device = FailingDevice()
    with engine(tmp_path / "root", device=device) as made:
        objects = chain("p", 3)
        made.store(objects)
        device.faults["preadv"] = errno.EIO
        results = made.fetch(objects[:1])
        assert [(result.reason, result.is_bad) for result in results] == [("io_error", True)]
        for number in (errno.EMFILE, errno.EINVAL):  # EINVAL: no O_DIRECT, where the root was replaced
            device.faults = {"open": number}
            results = made.fetch(objects[1:2])
            assert [(result.reason, result.is_bad) for result in results] == [("io_error", False)]
        device.faults.clear()
        assert made.reasons(objects[1:]) == [""] * 3


def test_an_unexpected_error_in_a_thread_is_a_result_and_the_thread_lives(tmp_path):
    class Broken(Device):
        breaks = False

        def fstat(self, fd):
            if self.breaks:
                raise RuntimeError("a defect")
            return super().fstat(fd)

        def pwritev(self, fd, segments, offset):
            if self.breaks:
                raise RuntimeError("a defect")
            return super().pwritev(fd, segments, offset)

    device = Broken()
    with engine(tmp_path / "root", device=device) as made:
        objects = chain("p", 2)
        made.store(objects[:1])
        device.breaks = True
        for _ in range(8):
            (result,) = made.fetch(objects[:1])
            assert (result.reason, result.is_bad) == ("error", False)
            assert made.outcome(objects[1]) == "error"
        device.breaks = False
        made.store(objects[1:])
        assert made.reasons(objects) == [""] * 3
        assert temporaries(made.root) == []


def test_a_removed_directory_is_a_miss_and_is_made_again(tmp_path):
    with engine(tmp_path / "root") as made:
        planned = chain("p", 1)[0]
        made.store([planned])
        made.path(planned).unlink()
        made.path(planned).parent.rmdir()
        assert made.reasons([planned]) == ["missing"]
        made.tier.drop(planned.object_id)
        made.store([planned])
        assert made.reasons([planned]) == [""]


def test_a_ticket_whose_lease_is_gone_is_not_kept(tmp_path):
    with engine(tmp_path / "root") as made:
        planned = chain("p", 1)[0]
        made.store(chain("before", 1))
        worker = made.workers[0]
        ticket = StoreTicket(ledger.NUM_SLOTS + 200, planned.object_id, (), 0, 64, OBJECT)
        buffer = worker.begin_store(ticket)
        fill(buffer, content(planned, 0))
        worker.submit_store(ticket, buffer)
        stored = []
        until(lambda: stored.extend(worker.poll()[0]) or stored)
        assert stored[0].reason == "no_lease"
        assert not made.path(planned).exists()
        assert temporaries(made.root) == []


# The end.


def test_close_writes_what_is_pending(tmp_path):
    device = GatedDevice("pwritev")
    made = Engine(tmp_path / "root", device=device, write_threads=1).recovered()
    objects = chain("p", 4)
    until(lambda: made.tier._reclaimer._lease.available)
    for planned in objects:
        ticket = made.tier.reserve(planned)
        buffer = made.workers[0].begin_store(ticket)
        fill(buffer, content(planned, 0))
        made.workers[0].submit_store(ticket, buffer)
    assert made.workers[0].pending_stores() == 5
    threading.Timer(0.1, device.gate.set).start()
    assert made.close(60.0) == 0
    with engine(tmp_path / "root") as again:
        again.recovered()
        assert again.coverage(objects) == [True] * 5
        assert again.reasons(objects) == [""] * 5


def test_close_gives_up_in_time_and_leaves_no_temporary(tmp_path):
    device = GatedDevice("pwritev")
    made = Engine(tmp_path / "root", device=device, write_threads=1).recovered()
    objects = chain("p", 2)
    until(lambda: made.tier._reclaimer._lease.available)
    for planned in objects:
        ticket = made.tier.reserve(planned)
        buffer = made.workers[0].begin_store(ticket)
        fill(buffer, content(planned, 0))
        made.workers[0].submit_store(ticket, buffer)
    device.waiting.acquire()
    assert made.workers[0].close(0.05) == 3
    assert temporaries(made.root) == []
    device.gate.set()
    until(lambda: not any(thread.is_alive() for thread in made.workers[0]._writers._threads))
    assert object_files(made.root) == []
    assert made.workers[0].begin_store(ticket) is None
    assert made.reasons(objects) == ["closed"] * 3
    made.tier.close()


def test_the_bytes_of_a_buffer_are_those_of_its_units_in_order(tmp_path):
    with engine(tmp_path / "root") as made:
        worker = made.workers[0]
        ticket = StoreTicket(256, chain("p", 1)[0].object_id, (), 0, 64, OBJECT)
        buffer = worker.begin_store(ticket)
        assert len(buffer.segments()) == 3
        assert buffer.array.ctypes.data % 4096 == 0
        assert np.concatenate(buffer.segments()).size == OBJECT
        worker.cancel_store(ticket, buffer)
