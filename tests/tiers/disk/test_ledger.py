# SPDX-License-Identifier: Apache-2.0
"""The ledger and what it stands on: bytes move between lease and files, and the locks hold."""

import errno
import logging
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.tiers.disk.devices import FailingDevice
from tests.tiers.disk.files import make_as_large_as_possible
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.tiers.disk.device import Device, temporary_name, writer_is_alive
from vllm_overlay.tiers.disk.lease import Lease, RecycledFile
from vllm_overlay.tiers.disk.ledger import NUM_SLOTS, Ledger, LedgerState
from vllm_overlay.tiers.disk.marker import write_marker


@pytest.fixture
def ledger(tmp_path):
    write_marker(Device(), str(tmp_path))
    ledger = Ledger(str(tmp_path), Device())
    ledger.reconcile(lambda: 0)
    return ledger


def grant(ledger, slot, num_bytes):
    with ledger.locked() as state:
        state.leases[slot] = num_bytes


def read(ledger, slot):
    with ledger.locked() as state:
        return state.file_bytes, state.leases[slot]


def write(path, num_bytes):
    path.write_bytes(bytes(num_bytes))
    return str(path)


def test_publishing_moves_bytes_from_the_lease_to_the_files(ledger, tmp_path):
    slot, fd = ledger.claim_slot()
    grant(ledger, slot, 1000)
    assert ledger.publish(slot, write(tmp_path / "t", 300), str(tmp_path / "f"))
    assert read(ledger, slot) == (300, 700)
    assert ledger.remove_files([str(tmp_path / "f"), str(tmp_path / "gone")]) == 300
    assert read(ledger, slot) == (0, 700)
    os.close(fd)


def test_publishing_over_a_file_takes_the_old_one_off(ledger, tmp_path):
    grant(ledger, 3, 1000)
    assert ledger.publish(3, write(tmp_path / "t", 300), str(tmp_path / "f"))
    assert ledger.publish(3, write(tmp_path / "t", 200), str(tmp_path / "f"))
    assert read(ledger, 3) == (200, 500)


def test_a_file_larger_than_any_object_counts_neither_when_it_comes_nor_when_it_goes(ledger, tmp_path):
    grant(ledger, 3, 1000)
    assert ledger.publish(3, write(tmp_path / "t", 300), str(tmp_path / "f"))
    for name in ("g", "h"):
        make_as_large_as_possible(tmp_path / name)
    assert ledger.retire(3, [(str(tmp_path / "g"), str(tmp_path / "spare"))], 1 << 63) == 0
    assert ledger.publish(3, write(tmp_path / "t", 200), str(tmp_path / "g"))
    assert ledger.remove_files([str(tmp_path / "h")]) == 0
    assert not (tmp_path / "h").exists()
    assert read(ledger, 3) == (500, 500)


def test_a_lease_that_does_not_cover_it_publishes_nothing(ledger, tmp_path):
    grant(ledger, 3, 299)
    assert not ledger.publish(3, write(tmp_path / "t", 300), str(tmp_path / "f"))
    assert read(ledger, 3) == (0, 299)
    assert not (tmp_path / "f").exists()


def test_a_retired_file_moves_its_bytes_back_to_the_lease(ledger, tmp_path):
    grant(ledger, 3, 1000)
    for name in ("a", "b"):
        assert ledger.publish(3, write(tmp_path / "t", 300), str(tmp_path / name))
    assert read(ledger, 3) == (600, 400)
    renames = [(str(tmp_path / name), str(tmp_path / f"spare {name}")) for name in ("a", "b")]
    assert ledger.retire(3, renames, 599) == 0
    assert ledger.retire(3, renames, 600) == 600
    assert read(ledger, 3) == (0, 1000)
    assert sorted(path.name for path in tmp_path.glob("* *")) == ["spare a", "spare b"]
    assert not any(path.exists() for path in (tmp_path / "a", tmp_path / "b"))
    assert ledger.publish(3, renames[0][1], renames[0][0])
    assert ledger.retire(3, renames, 600) == 0  # one of them is missing
    write(tmp_path / "b", 200)
    assert ledger.retire(3, renames, 600) == 0  # they differ
    assert (tmp_path / "a").exists() and (tmp_path / "b").exists()
    assert read(ledger, 3) == (300, 700)


def test_what_was_done_before_an_error_is_kept(tmp_path):
    device = FailingDevice()
    write_marker(device, str(tmp_path))
    ledger = Ledger(str(tmp_path), device)
    ledger.reconcile(lambda: 700)
    device.faults["unlink"] = errno.EIO
    assert ledger.remove_files([write(tmp_path / "a", 300)]) == 0
    assert read(ledger, 0) == (700, 0)
    with pytest.raises(RuntimeError), ledger.locked() as state:
        state.forget_file(300)
        raise RuntimeError
    assert read(ledger, 0) == (400, 0)


def test_a_ledger_that_could_not_be_written_is_counted_anew(ledger, tmp_path, monkeypatch):
    grant(ledger, 3, 1000)
    monkeypatch.setattr("os.pwrite", no_space)
    with pytest.raises(OSError, match="No space"):
        ledger.publish(3, write(tmp_path / "t", 300), str(tmp_path / "f"))
    monkeypatch.undo()
    assert (tmp_path / "f").exists()
    assert read(ledger, 3) == (None, 0)


def test_a_slot_that_could_not_be_written_down_is_not_held(ledger, monkeypatch):
    for slot in range(NUM_SLOTS):  # whichever it takes, it must be emptied
        grant(ledger, slot, 100)
    monkeypatch.setattr("os.pwrite", no_space)
    with pytest.raises(OSError, match="No space"):
        ledger.claim_slot()
    monkeypatch.undo()
    assert ledger.count_processes() == 0


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_each_living_process_has_its_own_slot_and_the_dead_ones_bytes_come_back(ledger):
    claimed = [ledger.claim_slot() for _ in range(3)]
    assert len({slot for slot, _ in claimed}) == 3
    assert ledger.count_processes() == 3
    for slot, _ in claimed:
        grant(ledger, slot, 100)
    os.close(claimed[1][1])
    assert ledger.count_processes() == 2
    with ledger.locked() as state:
        assert ledger.dead_slots(state) == [claimed[1][0]]
    ledger.reconcile(lambda: 5)
    assert [read(ledger, slot) for slot, _ in claimed] == [(5, 100), (5, 0), (5, 100)]
    for _, fd in (claimed[0], claimed[2]):
        os.close(fd)


def test_a_state_that_is_not_whole_is_an_uncounted_one():
    state = LedgerState(7, list(range(NUM_SLOTS)))
    raw = state.encode()
    assert LedgerState.decode(raw) == state
    for damaged in (b"", raw[:-1], raw + b"x", b"\xff" + raw[1:], bytes(len(raw))):
        assert LedgerState.decode(damaged) == LedgerState(None)


def test_the_spare_that_lies_by_longest_is_written_over_first() -> None:
    lease = Lease()
    for name in ("first", "second"):
        lease.put_back(RecycledFile((name,), 10))
    assert [lease.reserve(10), lease.reserve(10)] == [("first",), ("second",)]


def test_the_allowance_gives_what_was_leased_and_no_more():
    lease = Lease()
    assert lease.reserve(1) is None
    assert lease.refill(0, 100, 1000) == (100, 0)
    assert lease.reserve(60) == ()
    assert lease.reserve(60) is None
    assert lease.refill(100, 100, 40) == (140, 20)
    lease.commit(60)  # it was written: the lease is 60 smaller
    assert lease.refill(80, 100, -500) == (0, 520)
    assert lease.available == 0


def test_spares_are_part_of_the_lease_and_taken_once():
    lease = Lease()
    assert lease.refill(0, 100, 1000) == (100, 0)
    lease.put_back(RecycledFile(("a", "b"), 30))  # whose bytes the ledger has put into the lease
    assert (lease.available, lease.recycled_bytes) == (100, 30)
    assert lease.refill(130, 100, 1000) == (100, 0)  # more than a batch is given back
    assert (lease.available, lease.recycled_bytes) == (70, 30)
    assert lease.reserve(30) == ("a", "b")
    assert lease.reserve(30) == ()
    assert (lease.available, lease.recycled_bytes, lease.in_flight) == (40, 0, 60)
    assert not lease.must_shrink(-30) and lease.must_shrink(-31)
    lease.commit(30, is_over=True)
    lease.commit(30)  # both were written
    assert lease.must_shrink(-1)
    lease.put_back(RecycledFile(("c",), 20))
    assert lease.refill(60, 100, 0) == (60, 40)
    (spare,) = lease.take_recycled()
    assert lease.reserve(50) is None  # its file is still there
    lease.scrapped(spare)
    assert lease.refill(60, 100, 0) == (60, 40)
    assert lease.reserve(50) == ()
    lease.put_back(RecycledFile(("d",), 20))
    lease.drop_all()
    assert (lease.reserve(20), lease.recycled_bytes, lease.in_flight) == (None, 0, 50)


def test_an_allowance_is_low_when_new_files_or_all_stores_soon_have_no_room():
    lease = Lease()
    assert lease.is_low(100)
    lease.put_back(RecycledFile(("a",), 50))
    assert lease.is_low(100)  # spares of one size are no room for objects of another
    lease.refill(50, 100, 50)
    assert lease.available == 50 and not lease.is_low(100)
    assert lease.reserve(26) == ()
    assert lease.is_low(100)
    lease.commit(26)
    lease.refill(74, 100, 50)
    assert not lease.is_low(100)
    assert lease.reserve(50) == ("a",)
    assert not lease.is_low(100)
    assert lease.reserve(1) == ()
    assert lease.is_low(100)


def test_a_name_tells_whether_its_writer_lives():
    name = temporary_name()
    assert writer_is_alive(name)
    assert temporary_name() != name
    space, pid, start, count = name.removeprefix(".tmp.").split(".")
    for other in (
        f"{space}.99999999.1.2",
        f"{space}.{pid}.1.2",
        f"{space}.{pid}..2",
        f"{space}.²..1",
        f"{pid}.1.2",
        "",
    ):
        assert not writer_is_alive(f".tmp.{other}")
    for place in ("00000000", "ffffffff"):  # another host's, container's or boot's: nobody here can say
        assert writer_is_alive(f".tmp.{place}.{pid}.{start}.{count}") is None


def test_warnings_of_one_topic_are_counted_and_not_repeated(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    log = RateLimitedLog(logging.getLogger("test"))
    for _ in range(5):
        log.warning("a", "it failed: %s", "x")
    log.warning("b", "other")
    now[0] += 61
    log.warning("a", "it failed: %s", "y")
    assert caplog.messages == ["it failed: x", "other", "it failed: y (4 more like this since)"]


def place(path, kind):
    """Something in the place of a lock that no process can open as a file."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(path.parent)
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))


@pytest.mark.parametrize("kind", ["directory", "link", "socket"])
def test_a_slot_whose_lock_is_no_file_is_nobodys_and_another_one_is_taken(ledger, tmp_path, kind):
    grant(ledger, 0, 1000)
    place(tmp_path / "leases" / "0", kind)
    slot, fd = ledger.claim_slot()
    assert slot == 1
    assert ledger.count_processes() == 1
    ledger.reconcile(lambda: 0)
    assert read(ledger, 0) == (0, 0)
    os.close(fd)


def test_when_no_slot_can_be_locked_the_reason_is_told(ledger, monkeypatch):
    def refuse(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr("vllm_overlay.tiers.disk.ledger.try_lock", refuse)
    with pytest.raises(OSError, match="Read-only file system"):
        ledger.claim_slot()


def test_no_ledger_is_made_where_no_marker_is_and_none_is_written_over(tmp_path):
    ledger = Ledger(str(tmp_path), Device())
    for step in (ledger.claim_slot, lambda: ledger.remove_files(["gone"]), lambda: ledger.publish(0, "t", "f")):
        with pytest.raises(FileNotFoundError, match="removed or replaced"):
            step()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "ledger").write_text("2026-01-01 * opening balances")
    with pytest.raises(FileNotFoundError):
        ledger.reconcile(lambda: 0)
    assert (tmp_path / "ledger").read_text() == "2026-01-01 * opening balances"


class SlowDisk(Device):
    """A millisecond a removal."""

    def unlink(self, path: str) -> None:
        time.sleep(0.001)
        super().unlink(path)


def test_others_get_their_turn_while_many_files_are_removed(ledger, tmp_path):
    paths = [str(tmp_path / f"file-{number}") for number in range(20 * 64)]
    for path in paths:
        Path(path).touch()
    removing = threading.Thread(target=Ledger(str(tmp_path), SlowDisk()).remove_files, args=(paths,))
    removing.start()
    num_turns = 0
    while removing.is_alive():
        with ledger.locked():
            num_turns += 1
        time.sleep(0.002)
    assert num_turns > 10
