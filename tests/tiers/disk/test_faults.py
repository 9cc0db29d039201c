# SPDX-License-Identifier: Apache-2.0
"""Disks that fail for long, hang or vanish, and what spares them: each is a miss or a dropped store, and counted."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest

from tests.tiers.disk.devices import FailingDevice, GatedDevice, RuledDevice
from tests.tiers.disk.files import bytes_under, counted, object_files, on_disk
from tests.tiers.disk.inside import delay_bookkeeper, is_member, room_bytes
from tests.tiers.disk.objects import OBJECT, chain
from tests.tiers.disk.tier_pair import tier_pair
from tests.waiting import until
from vllm_overlay.common import circuit_breaker
from vllm_overlay.common.circuit_breaker import CircuitBreaker
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk import admission
from vllm_overlay.tiers.disk.admission import UseCounter, WriteRate
from vllm_overlay.tiers.disk.catalogue import Catalogue


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def disk_clock(monkeypatch):
    """The breakers' and the write rate's own: their pauses end when the test says so. Threads wait by the real one."""
    now = [1000.0]
    for module in (circuit_breaker, admission):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def later(clock) -> None:
    """The longest pause is over."""
    clock[0] += circuit_breaker.LONGEST_PAUSE_S


# The breaker.


def fail(made: CircuitBreaker, count: int) -> None:
    for _ in range(count):
        assert made.allows()
        made.report(True)


def test_faults_in_a_row_open_it_and_a_success_in_between_starts_anew(clock):
    made = CircuitBreaker("writes")
    fail(made, circuit_breaker.FAULTS_TO_OPEN - 1)
    made.report(False)
    fail(made, circuit_breaker.FAULTS_TO_OPEN)
    assert not made.allows()


def test_one_attempt_a_pause_and_pauses_double_up_to_a_bound(clock):
    made = CircuitBreaker("writes")
    fail(made, circuit_breaker.FAULTS_TO_OPEN)
    pauses = []
    for _ in range(10):
        began = clock[0]
        while not made.allows():
            clock[0] += 0.5
        pauses.append(clock[0] - began)
        assert not made.allows()
        made.report(True)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    clock[0] += 60
    assert made.allows()
    made.report(False)
    assert made.allows() and made.allows()


def test_a_success_makes_the_next_pause_the_first_again(clock):
    made = CircuitBreaker("writes")
    for _ in range(3):
        fail(made, circuit_breaker.FAULTS_TO_OPEN)
        assert made.pause_left_s() == 1.0
        clock[0] += 1.0
        assert made.allows()
        made.report(False)


def test_late_faults_of_earlier_attempts_do_not_lengthen_the_pause(clock):
    made = CircuitBreaker("writes")
    for _ in range(2 * circuit_breaker.FAULTS_TO_OPEN):
        made.report(True)
    clock[0] += 2.0
    assert made.allows()


def test_a_failing_disk_is_left_alone_until_it_works(tmp_path, disk_clock):
    device = FailingDevice()
    with tier_pair(tmp_path / "root", device=device) as made:
        objects = chain("p", 3)
        made.store(objects)
        device.faults = {"pwritev": errno.EIO, "preadv": errno.EIO}
        outcomes = [made.outcome(chain("q", 1)[0]) for _ in range(40)]
        assert set(outcomes) == {"io_error", "breaker"}
        assert outcomes[: circuit_breaker.FAULTS_TO_OPEN] == ["io_error"] * circuit_breaker.FAULTS_TO_OPEN
        device.faults = {"open": errno.EMFILE}
        reasons = [made.reasons(objects[:1])[0] for _ in range(40)]
        assert set(reasons) == {"io_error", "breaker"}
        assert all(made.path(planned).exists() for planned in objects)
        device.faults = {}
        until(lambda: later(disk_clock) or made.reasons(objects) == [""] * 4)
        until(lambda: later(disk_clock) or made.outcome(chain("q", 1)[0]) == "")


def test_bad_files_are_no_fault_of_the_disk(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        objects = chain("p", 20)
        made.store(objects)
        for planned in objects:
            os.truncate(made.path(planned), 100)
        assert made.reasons(objects) == ["size"] * 21
        for planned in objects:
            made.path(planned).unlink()
        assert made.reasons(objects) == ["missing"] * 21


# What spares the disk.


def test_a_rate_lets_pass_so_many_bytes_a_second(clock):
    rate = WriteRate(100, 30)
    passed = 0
    for _ in range(1000):
        if rate.allows(30):
            rate.spend(30)
            passed += 30
        clock[0] += 0.01
    assert 1000 <= passed <= 1100
    clock[0] += 1e6
    assert rate.allows(100) and not rate.allows(101)
    assert WriteRate(0, 1).allows(1 << 60)
    assert WriteRate(1, 1000).allows(1000)


def test_writes_stay_below_the_rate_and_go_on(tmp_path, disk_clock):
    with tier_pair(tmp_path / "root", max_write_bytes_per_s=4 * on_disk()) as made:
        made.recovered()
        until(lambda: room_bytes(made.tier))
        outcomes = [made.try_store(planned) for planned in chain("p", 5)]
        assert outcomes == [""] * 4 + ["no_room"] * 2
        later(disk_clock)
        made.store(chain("q", 1))


def test_an_object_is_wanted_at_its_nth_use(monkeypatch):
    monkeypatch.setattr("vllm_overlay.tiers.disk.admission._MAX_COUNTED", 2)
    one, two, three = (ObjectId("f0", bytes([n])) for n in range(3))
    counter = UseCounter(3)
    assert [counter.is_due(one) for _ in range(4)] == [False, False, True, True]
    assert not counter.is_due(two)
    assert not counter.is_due(three)  # forgets the first
    assert not counter.is_due(one)
    assert UseCounter(1).is_due(two)


def test_the_setting_reaches_the_tier(tmp_path):
    with tier_pair(tmp_path / "root", store_on_nth_use=2) as made:
        wanted = chain("p", 1)[0].object_id
        assert [made.tier.unwanted([wanted]) for _ in range(3)] == [[wanted], [], []]


# Real faults and those of network file systems.


def test_without_file_descriptors_it_misses_and_keeps_every_object(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 2))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        try:
            assert made.reasons(chain("p", 2)) == ["io_error"] * 3
            assert made.outcome(chain("q", 1)[0]) == "io_error"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert made.reasons(chain("p", 2)) == [""] * 3
        made.store(chain("q", 1))


def test_a_file_size_limit_is_a_dropped_store(tmp_path):
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (OBJECT // 2, hard))
        try:
            assert made.outcome(chain("q", 1)[0]) == "io_error"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, previous)
        assert len(object_files(made.root)) == 2
        made.store(chain("q", 1))


def leave(root):
    shutil.rmtree(root.rename(root.with_name("gone")), ignore_errors=True)


def replace_with_nothing(root):
    root.rename(root.with_name("elsewhere"))
    root.mkdir(mode=0o700)


def replace_with_another(root):
    """A root in which another process has stored, as when a file system is mounted over this one."""
    root.rename(root.with_name("elsewhere"))
    with tier_pair(root) as other:
        other.store(chain("r", 2))


@pytest.mark.parametrize("change", [leave, replace_with_nothing, replace_with_another])
def test_a_root_that_is_removed_or_replaced_is_left_and_the_new_one_taken(tmp_path, change, said):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 2))
        made.settled()
        with delay_bookkeeper(made.tier):  # before anybody makes another root there
            change(made.root)
        assert made.reasons(chain("p", 2)) == ["missing"] * 3
        until(lambda: made.tier.advance() or not made.has(chain("p", 2)[0]))  # not one by one as loads fail
        until(lambda: is_member(made.tier))
        made.recovered()
        assert made.coverage(chain("r", 2)) == [change is replace_with_another] * 3
        made.store(chain("q", 1))
        assert made.reasons(chain("q", 1)) == ["", ""]
        assert made.root.stat().st_mode & 0o777 == 0o700
        assert len(said("was removed or replaced")) == 1
        with tier_pair(made.root) as other:  # takes us for what we are: alive, with a namespace
            other.recovered()
            assert writers_in(made.root) == (2, 1)
            assert made.reasons(chain("q", 1)) == ["", ""]


CLEANERS = {
    "all files": 'find "$0" -type f -delete',
    "all that lies there": 'rm -rf "$0"/*',
    "all files, then empty directories": 'find "$0" -type f -delete; find "$0" -mindepth 1 -type d -empty -delete',
    "what is old": 'find "$0" -type f ! -name "catalogue*" -exec touch -d "-9 days" {} + ; '
    'find "$0" -type f -mtime +7 -delete',
}
"""As cron runs them. The catalogue is written all the time, and so is never old."""


@pytest.mark.parametrize("command", CLEANERS.values(), ids=CLEANERS)
def test_after_a_cleaner_stores_go_on_and_an_empty_tree_is_a_root(tmp_path, said, command):
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 1))
        made.settled()
        with delay_bookkeeper(made.tier):  # it would make files while they are removed
            subprocess.run(["sh", "-c", command, root], check=True)
        until(lambda: said("was removed or replaced, and begins anew"), "a word of it")
        assert set(made.reasons(chain("p", 1))) == {"missing"}
        made.store_at_last(chain("q", 1)[0])
        until(lambda: made.reasons(chain("q", 1)[:1]) == [""], "a load")
    assert len(said("was removed or replaced")) == 1
    subprocess.run(["sh", "-c", CLEANERS["all files"], root], check=True)
    assert [path for path in root.rglob("*") if path.is_file()] == []
    with tier_pair(root) as again:
        again.recovered().store(chain("q", 1))
        assert again.reasons(chain("q", 1)) == ["", ""]


def writers_in(root):
    """How many writers serve a namespace, and how many namespaces somebody serves."""
    catalogue = Catalogue(str(root))
    try:
        return catalogue.totals().num_writers, sum(usage.is_served for usage in catalogue.usage())
    finally:
        catalogue.close()


@pytest.mark.parametrize(
    "pattern", ["*/alive", "catalogue-1.sqlite", "catalogue-1.sqlite*", "catalogue*", "vllm-overlay-root.json"]
)
def test_what_the_catalogue_needs_and_somebody_removed_is_made_anew(tmp_path, pattern):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
        made.recovered()
        until(lambda: counted(made.root)[0] == bytes_under(made.root), "the catalogue to know it all")
        for path in list(made.root.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for there in ("*/alive", pattern):
            until(lambda there=there: [*made.root.glob(there)], f"{there} anew")
        until(lambda: writers_in(made.root) == (1, 1), "a writer that serves")
        made.store_at_last(chain("q", 1)[0])
        made.recovered()
        until(lambda: made.tier.advance() or made.has(chain("p", 1)[0]))
        assert made.reasons(chain("p", 1)) == ["", ""]
    assert writers_in(made.root)[0] == 0


def test_a_new_root_that_everyone_may_write_is_not_taken(tmp_path, said):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
        with delay_bookkeeper(made.tier):  # before anybody takes it
            replace_with_nothing(made.root)
            made.root.chmod(0o777)
        until(lambda: said("has mode 0777, so others may write it"), "a word of it")
        assert made.reasons(chain("p", 1)) == ["missing", "missing"]
        for _ in range(3):
            assert made.turned().try_store(chain("q", 1)[0]) == "no_room"
        assert list(made.root.iterdir()) == []
        made.root.chmod(0o700)
        made.store_at_last(chain("q", 1)[0])


def test_reads_that_hang_are_given_up_and_nothing_waits_for_them_twice(tmp_path, disk_clock):
    """What the connector does with a load that is late. The read threads hang, one after the other: while all do, the
    pause does not end."""
    device = GatedDevice("preadv")
    with tier_pair(tmp_path / "root", device=device, read_threads=2) as made:
        made.store(chain("p", 1))
        worker, planned = made.workers[0], chain("p", 1)[0]
        ticket = made.load_ticket(planned)
        for turn in range(2):
            worker.begin_load(f"late {turn}", [ticket])
            device.await_call()  # the thread reads, so it asks no breaker later
            assert worker.poll() == ([], [])
            worker.load_was_late(f"late {turn}")
            worker.cancel_load(f"late {turn}")
            assert worker.load_pause_s() > 0
            worker.begin_load(f"at once {turn}", [ticket])
            _, fetched = worker.poll()
            assert [(result.reason, result.is_bad) for result in fetched] == [("breaker", False)]
            later(disk_clock)
            assert (worker.load_pause_s() > 0) == (turn == 1)
        worker.begin_load("at once", [ticket])
        assert [result.reason for result in worker.poll()[1]] == ["breaker"]
        device.gate.set()
        until(lambda: later(disk_clock) or made.reasons(chain("p", 1)) == ["", ""])
        assert worker.load_pause_s() == 0


def test_jumps_of_the_clock_change_nothing(tmp_path, monkeypatch):
    real = time.time
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 2))
        for jump in (-1e6, 1e9):
            monkeypatch.setattr("time.time", lambda jump=jump: real() + jump)
            made.store(chain(f"q{jump}", 1))
            assert made.reasons([*chain("p", 2), *chain(f"q{jump}", 1)]) == [""] * 5
    for age, path in enumerate(object_files(made.root)):
        os.utime(path, (real() + (-1) ** age * 1e8,) * 2)
    with tier_pair(tmp_path / "root") as again:
        again.recovered()
        assert again.reasons(chain("p", 2)) == [""] * 3
        assert again.coverage(chain("p", 2)) == [True] * 3


def test_a_disk_that_takes_seconds_a_call_loses_nothing(tmp_path, monkeypatch):
    real, lost_s = time.monotonic, [0.0]
    monkeypatch.setattr("time.monotonic", lambda: real() + lost_s[0])

    def slow(call, path):
        lost_s[0] += call_s[0] if call in ("preadv", "pwritev") else 0.0

    call_s = [0.0]
    with tier_pair(tmp_path / "root", device=RuledDevice(slow)) as made:
        made.recovered()
        call_s[0] = 10.0
        made.store(chain("p", 1))
        assert all(result.reason is None and result.seconds >= 10 for result in made.fetch(chain("p", 1)))
