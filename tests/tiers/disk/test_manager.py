# SPDX-License-Identifier: Apache-2.0
"""The index half: start, restart, capacity, several processes."""

import ast
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.tiers.disk.engine import (
    NAMESPACE,
    OBJECT,
    OTHER_NAMESPACE,
    Engine,
    FailingDevice,
    bytes_of_objects,
    bytes_under,
    chain,
    engine,
    object_files,
    on_disk,
    settings,
    temporaries,
    until,
)
from vllm_overlay.config import ConfigError
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.device import Device, temporary_name
from vllm_overlay.tiers.disk.gc import collect
from vllm_overlay.tiers.disk.ledger import Ledger
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.recovery import FoundObject, parents_first
from vllm_overlay.tiers.disk.usage import measure_usage

REPOSITORY = Path(__file__).parents[3]


def ledger_of(root: Path):
    """(bytes of files, bytes leased) as the ledger has them."""
    with Ledger(str(root), Device()).locked() as state:
        return state.file_bytes, sum(state.leases)


# Start.


def open_tier(root, **changes):
    DiskTierManager(settings(root, **changes), NAMESPACE, 1, OBJECT).close()


def test_the_root_is_created_private_and_says_whose_it_is(tmp_path):
    root = tmp_path / "a" / "root"
    with engine(root) as made:
        made.recovered()
        until(lambda: all((root / name / "namespace.json").exists() for name in NAMESPACE.fingerprints))
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    for fingerprint in NAMESPACE.fingerprints:
        words = json.loads((root / fingerprint / "namespace.json").read_text())
        assert words["description"] == {"model": "tiny"}
    assert temporaries(root) == []


def test_opening_a_root_tells_what_else_lives_there(tmp_path, caplog):
    caplog.set_level("INFO")
    with engine(tmp_path / "root", namespace=OTHER_NAMESPACE) as other:
        other.store(chain("p", 2))
    assert not any("other namespaces" in message for message in caplog.messages)
    with engine(tmp_path / "root") as made:
        made.recovered()
        (said,) = [message for message in caplog.messages if "other namespaces" in message]
    assert f"2 other namespaces of {3 * on_disk()} bytes" in said
    assert f"{2 * on_disk()} bytes of model 'another' (idle)" in said


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "root").write_text("")
    with pytest.raises(ConfigError, match=r"root=.* is not a directory"):
        open_tier(tmp_path / "root")
    with pytest.raises(ConfigError, match=r"root=.* cannot be created"):
        open_tier(tmp_path / "root" / "below")


def test_a_root_that_everyone_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"root=.* writable by everyone: set its mode to 0700"):
        open_tier(tmp_path)


@pytest.fixture
def as_nobody():
    """A directory, and this process without root's rights."""
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    os.seteuid(0)
    shutil.rmtree(directory)


def test_a_root_of_another_user_is_refused(as_nobody):
    os.seteuid(65534)
    with pytest.raises(ConfigError, match=r"root=.* belongs to user 0"):
        open_tier(as_nobody)


def test_a_root_that_cannot_be_written_is_refused(as_nobody):
    os.chown(as_nobody, 65534, 65534)
    as_nobody.chmod(0o500)
    os.seteuid(65534)
    with pytest.raises(ConfigError, match=r"root=.* is not writable"):
        open_tier(as_nobody)
    with pytest.raises(ConfigError, match=r"root=.* cannot be created"):
        open_tier(as_nobody / "below")


def take_locks_from(monkeypatch, directory):
    """No file under ``directory`` can be locked any more."""
    real = fcntl.flock

    def flock(fd, operation):
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(directory):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(fd, operation)

    monkeypatch.setattr("fcntl.flock", flock)


def test_without_locks_anywhere_a_root_is_refused(tmp_path, monkeypatch):
    take_locks_from(monkeypatch, "/")
    with pytest.raises(ConfigError, match=r"root=.* takes no file locks"):
        open_tier(tmp_path / "root")


@pytest.fixture
def lockless(tmp_path, monkeypatch):
    """A root on a file system without locks, and a local directory with them."""
    (tmp_path / "local").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "local"))
    take_locks_from(monkeypatch, tmp_path / "root")
    return tmp_path / "root"


def host_root(root):
    """The one sub-root."""
    (found,) = [path for path in root.iterdir() if path.name.startswith("host-")]
    return found


def test_without_locks_a_host_has_its_sub_root_and_limit_and_the_log_says_so(lockless, caplog):
    capacity = 15 * on_disk()
    with engine(lockless, capacity_bytes=capacity) as made, engine(lockless, capacity_bytes=capacity) as other:
        root = host_root(lockless)
        said = [message for message in caplog.messages if "has no file locks" in message]
        assert said and str(root) in said[0] and "for this host alone" in said[0]
        seen = []
        for turn in range(20):
            for one in (made, other):
                one.store(chain(f"{turn}", 2))
                seen.append(bytes_under(root))
        assert max(seen) <= capacity
        assert Ledger(str(root), Device()).count_processes() == 2
        assert measure_usage(str(root))[0].is_in_use
        assert collect(str(root), 0).removed_files == 0  # all of it is served
    with engine(lockless, capacity_bytes=capacity) as again:
        again.recovered()
        assert len(again.tier.index) > 0


def test_two_hosts_without_locks_do_not_meet(lockless, monkeypatch):
    with engine(lockless) as made:
        made.store(chain("p", 1))
        monkeypatch.setattr("socket.gethostname", lambda: "another")
        with engine(lockless) as other:
            other.recovered()
            assert len(other.tier.index) == 0
            other.store(chain("p", 1))
    assert len([path for path in lockless.iterdir() if path.name.startswith("host-")]) == 2


def test_a_capacity_below_two_objects_is_refused_with_one_that_works(tmp_path):
    with pytest.raises(ConfigError, match="capacity_bytes") as refusal:
        open_tier(tmp_path / "root", capacity_bytes=on_disk())
    open_tier(tmp_path / "root", capacity_bytes=int(str(refusal.value).split()[-1]))


def test_a_full_or_failing_disk_at_start_is_not_fatal(tmp_path):
    device = FailingDevice(open=errno.ENOSPC)
    made = Engine(tmp_path / "root", device=device)
    assert made.try_store(chain("p", 1)[0]) in ("no_room", "no_space")
    device.faults.clear()
    made.store(chain("p", 1))
    made.close()


# Names.


@pytest.mark.parametrize(
    "planned",
    [
        PlannedObject(ObjectId("../f", b"k"), (), 0, 64, OBJECT),
        PlannedObject(ObjectId("f0", b"k" * 65), (), 0, 64, OBJECT),
        PlannedObject(ObjectId("f0", b"k"), (ObjectId("f0", b""),), 0, 64, OBJECT),
        PlannedObject(ObjectId("f0", b"k"), tuple(ObjectId("f0", bytes([n])) for n in range(9)), 0, 64, OBJECT),
        PlannedObject(ObjectId("f0", b"k"), (), 0, 64, 0),
    ],
)
def test_what_no_file_can_carry_is_not_reserved(tmp_path, planned):
    with engine(tmp_path / "root") as made:
        made.store(chain("p", 1))
        assert made.tier.reserve(planned) is None


def test_a_child_without_its_parent_is_not_reserved(tmp_path):
    with engine(tmp_path / "root") as made:
        made.store(chain("p", 1))
        assert made.tier.reserve(chain("q", 2)[1]) is None


# Loads and drops.


def test_acquired_objects_stay_until_released(tmp_path):
    with engine(tmp_path / "root") as made:
        objects = chain("p", 2)
        made.store(objects)
        tickets = made.tier.acquire(objects)
        assert [ticket.object_id for ticket in tickets] == [planned.object_id for planned in objects]
        assert [ticket.num_bytes for ticket in tickets] == [OBJECT] * 3
        made.tier.drop(objects[0].object_id)
        assert made.tier.acquire(objects) is None
        assert all(made.path(planned).exists() for planned in objects)
        made.tier.release([planned.object_id for planned in objects])
        until(lambda: object_files(made.root) == [])


def test_a_dropped_chunk_takes_what_lies_on_top_with_it(tmp_path):
    with engine(tmp_path / "root") as made:
        objects = chain("p", 4)
        made.store(objects)
        made.tier.drop(objects[1].object_id)
        assert made.coverage(objects) == [True, False, False, False, False]
        until(lambda: object_files(made.root) == [made.path(objects[0])])
        made.store(objects[1:])
        assert made.reasons(objects) == [""] * 5


def test_no_call_of_the_scheduler_waits_for_the_disk(tmp_path):
    with engine(tmp_path / "root", capacity_bytes=12 * on_disk()) as made:
        objects = chain("p", 5)
        made.store(objects)
        with Ledger(str(made.root), Device()).locked():  # as a process that was stopped holds it
            tickets = made.tier.acquire(objects)
            assert tickets is not None
            made.tier.release([planned.object_id for planned in objects])
            made.tier.drop(objects[4].object_id)
            assert made.tier.reserve(objects[4]) is None  # its old file is yet to be unlinked
            reserved = [made.tier.reserve(chain(name, 1)[0]) for name in "abcdefgh"]
            for ticket in filter(None, reserved[::2]):
                made.tier.commit(ticket.ticket)
            for ticket in filter(None, reserved[1::2]):
                made.tier.abort(ticket.ticket)
            made.tier.advance()
            made.tier.usage()
            assert made.path(objects[4]).exists()
        made.store(objects[4:])
        assert made.reasons(objects) == [""] * 6


def test_usage_counts_whole_files_of_all_ranks(tmp_path):
    with engine(tmp_path / "root", world_size=2) as made:
        made.store(chain("p", 2))
        usage = made.tier.usage()
        assert usage.num_objects == 3
        assert usage.used_bytes == 6 * on_disk() == bytes_under(made.root)
        assert ledger_of(made.root)[0] == usage.used_bytes


# Restart.


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_restart_finds_the_same_coverage(tmp_path, world_size):
    prompts = [chain(name, length) for name, length in (("p", 5), ("q", 1), ("r", 9))]
    with engine(tmp_path / "root", world_size=world_size) as made:
        for objects in prompts:
            made.store(objects)
        used = made.tier.usage().used_bytes
    with engine(tmp_path / "root", world_size=world_size) as again:
        again.recovered()
        for objects in prompts:
            assert again.coverage(objects) == [True] * len(objects)
            assert again.reasons(objects, rank=world_size - 1) == [""] * len(objects)
        assert again.tier.usage().used_bytes == used
        again.store(chain("s", 2))


def test_recovery_works_while_the_tier_serves(tmp_path):
    with engine(tmp_path / "root") as made:
        made.store(chain("p", 600))
    with engine(tmp_path / "root") as again:
        again.store(chain("q", 3))
        again.recovered()
        assert all(again.coverage(chain("p", 600)) + again.coverage(chain("q", 3)))


def test_a_missing_middle_chunk_discards_what_lies_on_top(tmp_path):
    objects = chain("p", 5)
    with engine(tmp_path / "root") as made:
        made.store(objects)
    made.path(objects[2]).unlink()
    time.sleep(0.1)
    with engine(tmp_path / "root") as again:
        again.recovered()
        assert again.coverage(objects) == [True, True, False, False, False, False]
        until(lambda: len(object_files(again.root)) == 2)
        until(lambda: ledger_of(again.root)[0] == 2 * on_disk())


def test_an_object_without_one_ranks_file_is_not_there(tmp_path):
    objects = chain("p", 2)
    with engine(tmp_path / "root", world_size=2) as made:
        made.store(objects)
    made.path(objects[1], 1).unlink()
    time.sleep(0.1)
    with engine(tmp_path / "root", world_size=2) as again:
        again.recovered()
        assert again.coverage(objects) == [True, False, False]
        until(lambda: object_files(again.root) == sorted([again.path(objects[0], 0), again.path(objects[0], 1)]))


@pytest.mark.parametrize("damage", ["header", "short", "swapped", "symlink", "empty"])
def test_recovery_does_not_take_a_damaged_file(tmp_path, damage):
    objects = chain("p", 3)
    with engine(tmp_path / "root") as made:
        made.store(objects)
    path = made.path(objects[2])
    if damage == "header":
        with open(path, "r+b") as file:
            file.seek(30)
            file.write(b"\xff")
    elif damage == "swapped":
        shutil.copy(made.path(objects[1]), path)
    elif damage == "symlink":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.truncate(path, 0 if damage == "empty" else 8192)
    time.sleep(0.1)
    with engine(tmp_path / "root") as again:
        again.recovered()
        assert again.coverage(objects) == [True, True, False, False]
        until(lambda: not os.path.lexists(path))


def test_a_file_in_a_wrong_place_goes_and_the_object_in_the_right_one_stays(tmp_path):
    objects = chain("p", 1)
    with engine(tmp_path / "root") as made:
        made.store(objects)
    right = made.path(objects[0])
    elsewhere = right.parent.parent / ("00" if right.parent.name != "00" else "01")
    wrong = [elsewhere / right.name, right.with_name(right.name.replace(".r0", ".r1"))]
    for path in wrong:
        path.parent.mkdir(exist_ok=True)
        shutil.copy(right, path)
    time.sleep(0.1)
    with engine(tmp_path / "root") as again:
        again.recovered()
        assert again.coverage(objects) == [True, True]
        until(lambda: not any(path.exists() for path in wrong))
        assert again.reasons(objects) == ["", ""]


class Refusing(Device):
    """One file cannot be opened."""

    def __init__(self, path: Path, error: Exception) -> None:
        self._path, self._error = str(path), error

    def open(self, path: str, flags: int) -> int:
        if path == self._path:
            raise self._error
        return super().open(path, flags)


def test_what_builds_on_an_object_that_could_not_be_read_now_stays_for_the_next_start(tmp_path):
    objects = chain("p", 5)
    with engine(tmp_path / "root") as made:
        made.store(objects)
    time.sleep(0.1)
    shortage = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with engine(tmp_path / "root", device=Refusing(made.path(objects[2]), shortage)) as short:
        short.recovered()
        assert short.coverage(objects) == [True, True, False, False, False, False]
    assert len(object_files(made.root)) == 6
    with engine(tmp_path / "root") as again:
        assert all(again.recovered().coverage(objects))


def test_what_builds_on_a_directory_that_could_not_be_listed_now_stays_for_the_next_start(tmp_path, monkeypatch):
    objects = chain("p", 5)
    with engine(tmp_path / "root") as made:
        made.store(objects)
    time.sleep(0.1)
    scandir, unlisted = os.scandir, str(made.path(objects[2]).parent)

    def short(path: str):
        if path == unlisted and threading.current_thread().name.startswith("disk-recovery"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return scandir(path)

    monkeypatch.setattr("os.scandir", short)
    with engine(tmp_path / "root") as scanned:
        scanned.recovered()
        assert not all(scanned.coverage(objects))
    monkeypatch.undo()
    assert len(object_files(made.root)) == 6
    with engine(tmp_path / "root") as again:
        assert all(again.recovered().coverage(objects))


def test_a_count_that_cannot_be_made_now_is_made_later(tmp_path, monkeypatch):
    with engine(tmp_path / "root") as made:
        made.store(chain("p", 5))
    scandir, fails = os.scandir, [True]

    def short(path: str):
        if fails and len(os.path.basename(path)) == 2 and threading.current_thread().name == "disk-reclaimer":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return scandir(path)

    monkeypatch.setattr("os.scandir", short)
    (made.root / "ledger").unlink()
    with engine(tmp_path / "root") as again:
        again.recovered()
        assert again.try_store(chain("q", 1)[0]) == "no_room"
        fails.clear()
        until(lambda: ledger_of(again.root)[0] == 6 * on_disk())


def test_a_scan_that_fails_finds_nothing_and_removes_nothing(tmp_path, caplog):
    objects = chain("p", 5)
    with engine(tmp_path / "root") as made:
        made.store(objects)
    time.sleep(0.1)
    defect = RuntimeError("nobody has thought of this")
    with engine(tmp_path / "root", device=Refusing(made.path(objects[2]), defect)) as failed:
        failed.recovered()
        assert len(failed.tier.index) == 0
    assert any("nobody has thought of this" in message for message in caplog.messages)
    assert len(object_files(made.root)) == 6


def test_an_idle_engine_steps_until_what_was_there_is_known(tmp_path, monkeypatch):
    with engine(tmp_path / "root") as made:
        made.recovered()
        made.store(chain("p", 3))
        assert not made.tier.has_more_to_come()
    with engine(tmp_path / "root") as again:
        assert again.tier.has_more_to_come()
        until(lambda: again.tier.advance() or not again.tier.has_more_to_come())
        assert all(again.coverage(chain("p", 3)))
    monkeypatch.setattr("vllm_overlay.tiers.disk.manager._AWAKE_S", 0.0)
    with engine(tmp_path / "root") as slow:
        assert slow.tier.is_recovering
        assert not slow.tier.has_more_to_come()


def test_files_of_no_object_are_left_alone(tmp_path):
    with engine(tmp_path / "root") as made:
        made.store(chain("p", 1))
    stranger = made.path(chain("p", 1)[0]).parent / "notes.txt"
    stranger.write_text("mine")
    with engine(tmp_path / "root") as again:
        again.recovered()
        assert again.coverage(chain("p", 1)) == [True, True]
    assert stranger.exists()


def test_parents_come_first_and_else_the_oldest():
    def found(name, parents, mtime):
        ids = tuple(ObjectId("f0", parent.encode()) for parent in parents)
        return FoundObject(PlannedObject(ObjectId("f0", name.encode()), ids, 0, 64, 1), mtime, ())

    items = [
        found("d", "bc", 1), found("b", "a", 3), found("c", "a", 4), found("a", "", 5), found("z", "", 2),
        found("x", "y", 0), found("y", "x", 0), found("o", "gone", 0), found("u", "xa", 0),
    ]  # fmt: skip
    reachable, unreachable = parents_first(items)
    names = "".join(item.planned.object_id.key.decode() for item in reachable)
    assert sorted(names) == sorted("abcdz")
    assert names.index("a") < min(names.index("b"), names.index("c"))
    assert names[-2:] == "dz"
    assert sorted(item.planned.object_id.key for item in unreachable) == [b"o", b"u", b"x", b"y"]


# Processes that die.

WRITER = """
import sys
from pathlib import Path
from tests.tiers.disk.engine import Engine, chain
made = Engine(Path(sys.argv[1])).recovered()
print("ready", flush=True)
for turn in range(10_000):
    made.store(chain(f"{sys.argv[2]}-{turn}", 3))
"""


def start(source: str, *arguments: object) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("turn", range(3))
def test_after_kill_9_no_bad_object_is_found_and_no_temporary_stays(tmp_path, turn):
    root = tmp_path / "root"
    writer = start(WRITER, root, "w")
    until(lambda: len(object_files(root)) > 5 + 20 * turn)
    kill(writer)
    directory = object_files(root)[0].parent
    name = temporary_name().replace(f".{os.getpid()}.", f".{writer.pid}.")
    (directory / name).write_bytes(b"half an object")  # as a writer killed between two writes leaves it
    with engine(root) as again:
        again.recovered()
        until(lambda: temporaries(root) == [])
        until(lambda: ledger_of(root)[0] == bytes_under(root))
        for turn in range(1000):
            objects = chain(f"w-{turn}", 3)
            held = [planned for planned in objects if again.has(planned)]
            assert held == objects[: len(held)]
            assert again.reasons(held) == [""] * len(held)
            if not held:
                break
        assert turn > 0


def test_a_temporary_stays_while_its_writer_lives_or_where_nobody_can_say_until_it_is_old(tmp_path):
    root = tmp_path / "root"
    with engine(root) as made:
        made.store(chain("p", 1))
        directory = object_files(root)[0].parent
        own, own_old = (directory / temporary_name() for _ in range(2))
        theirs, theirs_old = (directory / re.sub(r"[0-9a-f]{8}", "0" * 8, temporary_name(), count=1) for _ in range(2))
        for path in (own, own_old, theirs, theirs_old):
            path.write_bytes(b"on its way")
        for path in (own_old, theirs_old):
            os.utime(path, (time.time() - 7200,) * 2)
        with engine(root) as other:  # not alone
            other.store(chain("q", 1))
            assert temporaries(root) == sorted([own, own_old, theirs])
    with engine(root) as alone:
        alone.store(chain("r", 1))
        assert temporaries(root) == sorted([own, own_old])


def test_the_lease_of_a_dead_process_comes_back(tmp_path):
    root = tmp_path / "root"
    capacity = 6 * on_disk()
    source = """
import sys, time
from pathlib import Path
from tests.tiers.disk.engine import Engine, until
made = Engine(Path(sys.argv[1]), capacity_bytes=int(sys.argv[2])).recovered()
until(lambda: made.tier._reclaimer._lease.available)
print("ready", flush=True)
time.sleep(600)
"""
    holders = [start(source, root, capacity) for _ in range(3)]
    assert ledger_of(root) == (0, capacity)
    with engine(root, capacity_bytes=capacity) as made:
        made.recovered()
        assert made.try_store(chain("p", 1)[0]) == "no_room"
        kill(holders[0])
        made.store(chain("p", 1))
        for holder in holders[1:]:
            kill(holder)
        made.store(chain("q", 3))
        until(lambda: ledger_of(root) == (4 * on_disk(), 2 * on_disk()))
        assert bytes_under(root) == 4 * on_disk()


# Capacity.


def store_many(made: Engine, count: int, watch) -> None:
    for turn in range(count):
        made.store(chain(f"many-{turn}", 2))
        watch()


def test_the_capacity_holds_when_twenty_times_as_much_is_stored(tmp_path):
    capacity = 15 * on_disk()
    seen = []
    with engine(tmp_path / "root", capacity_bytes=capacity) as made:
        store_many(made, 100, lambda: seen.append(bytes_under(made.root)))
        usage = made.tier.usage()
        assert usage.evicted_objects >= 280
        held = [planned for turn in range(100) for planned in chain(f"many-{turn}", 2) if made.has(planned)]
        assert made.has(chain("many-99", 2)[2])
        assert made.reasons(held) == [""] * len(held)
    assert max(seen) <= capacity
    assert max(seen) >= capacity // 2


def test_the_capacity_holds_across_restarts_and_when_it_is_lowered(tmp_path):
    root = tmp_path / "root"
    with engine(root, capacity_bytes=40 * on_disk()) as made:
        store_many(made, 20, lambda: None)
    lower = 12 * on_disk()
    with engine(root, capacity_bytes=lower) as again:
        again.recovered()
        until(lambda: again.tier.advance() or bytes_under(root) <= lower)
        seen = []
        store_many(again, 20, lambda: seen.append(bytes_under(root)))
        assert max(seen) <= lower
        until(lambda: ledger_of(root)[0] == bytes_of_objects(root))


def test_two_processes_keep_one_capacity(tmp_path):
    root = tmp_path / "root"
    capacity = 20 * on_disk()
    source = WRITER.replace("Engine(Path(sys.argv[1]))", f"Engine(Path(sys.argv[1]), capacity_bytes={capacity})")
    writer = start(source, root, "w")
    seen = []
    try:
        with engine(root, namespace=OTHER_NAMESPACE, capacity_bytes=capacity) as made:
            store_many(made, 100, lambda: seen.append(bytes_under(root)))
            assert writer.poll() is None
    finally:
        kill(writer)
    assert max(seen) <= capacity
    assert max(seen) >= capacity // 2


SHARER = """
import itertools, sys, time
from collections import Counter
from pathlib import Path
from tests.tiers.disk.engine import Engine, chain, until
made = Engine(Path(sys.argv[1]), capacity_bytes=int(sys.argv[2]))
print("ready", flush=True)
reasons = Counter()

def store(planned):
    # A parent may go while its child waits for room: then the child is given up, as the connector does.
    if made.has(planned):
        return "there"
    while all(made.tier.index.has(parent) for parent in planned.parents):
        if (reason := made.try_store(planned)) != "no_room":
            return reason
        time.sleep(0.001)
    return "no parent"

held = []
for turn in itertools.count():
    objects = chain(f"{sys.argv[3]}-{turn % 45}", 2)
    reasons.update(store(planned) for planned in objects)
    held = [planned for planned in held[-9:] + objects if made.has(planned)]
    for planned, reason in zip(held, made.reasons(held)):  # compares the bytes
        reasons[f"load {reason}"] += 1
        if reason:
            made.tier.drop(planned.object_id)
    if reasons[""] >= 180:
        break
made.close()
print(dict(reasons), flush=True)
"""


def test_three_processes_keep_one_capacity_and_what_they_read_is_right(tmp_path):
    """In one namespace, so that each evicts what the others store too; 20 times the limit is stored."""
    root, capacity = tmp_path / "root", 26 * on_disk()
    sharers = [start(SHARER, root, capacity, name) for name in "xyz"]
    seen = []
    try:
        while any(sharer.poll() is None for sharer in sharers):
            seen.append(bytes_under(root))
            time.sleep(0.001)
        ended = [ast.literal_eval(sharer.stdout.readline()) for sharer in sharers]
    finally:
        for sharer in sharers:
            kill(sharer)
    assert max(seen) <= capacity
    assert max(seen) >= capacity // 2
    assert set().union(*ended) <= {"", "there", "no parent", "load ", "load missing"}


def test_two_processes_that_store_the_same_objects_count_them_once(tmp_path):
    root = tmp_path / "root"
    with engine(root) as one, engine(root) as two:
        one.recovered()
        two.recovered()
        one.store(chain("p", 4))
        two.store(chain("p", 4))
        assert ledger_of(root)[0] == bytes_under(root) == 5 * on_disk()
        two.tier.drop(chain("p", 4)[0].object_id)
        until(lambda: object_files(root) == [])
        until(lambda: ledger_of(root)[0] == 0)
        assert one.reasons(chain("p", 4)) == ["missing"] * 5


def test_the_oldest_objects_of_a_namespace_that_nobody_serves_go_first(tmp_path):
    root = tmp_path / "root"
    capacity = 10 * on_disk()
    with engine(root, namespace=OTHER_NAMESPACE, capacity_bytes=capacity) as other:
        other.store(chain("old", 8))
    for age, path in enumerate(sorted(object_files(root), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(path, (1_000_000 + age,) * 2)
    with engine(root, capacity_bytes=capacity) as made:
        made.recovered()
        made.store(chain("new", 3))
        assert made.reasons(chain("new", 3)) == [""] * 4
        assert bytes_under(root) <= capacity
        assert made.tier.usage().evicted_objects == 0
    left = [other.path(planned).exists() for planned in chain("old", 8)]
    assert left == sorted(left)
    assert any(left)


def test_a_namespace_that_nobody_serves_goes_as_a_whole_in_the_end(tmp_path):
    root = tmp_path / "root"
    capacity = 10 * on_disk()
    with engine(root, namespace=OTHER_NAMESPACE, capacity_bytes=capacity) as other:
        other.store(chain("old", 4))
    with engine(root, capacity_bytes=capacity) as made:
        store_many(made, 10, lambda: None)
        until(lambda: not any((root / name).exists() for name in OTHER_NAMESPACE.fingerprints))
    with engine(root, namespace=OTHER_NAMESPACE, capacity_bytes=capacity) as other:
        other.store(chain("old", 1)[:1])


def test_a_newcomer_gets_its_share_of_a_root_that_another_process_has_filled(tmp_path):
    root = tmp_path / "root"
    capacity = 24 * on_disk()
    with engine(root, namespace=OTHER_NAMESPACE, capacity_bytes=capacity) as other:
        store_many(other, 10, lambda: None)
        with engine(root, capacity_bytes=capacity) as made:
            made.recovered()
            made.store(chain("new", 7))
            assert made.tier.usage().evicted_objects == 0
            assert bytes_under(root) <= capacity
            assert made.reasons(chain("new", 7)) == [""] * 8
            store_many(made, 10, lambda: None)
            assert made.tier.usage().evicted_objects > 0
            assert other.reasons(chain("many-9", 2)) == [""] * 3


def test_nothing_is_written_below_the_free_space_to_keep(tmp_path):
    class Filling(Device):
        free = 1 << 40

        def free_bytes(self, path: str) -> int:
            return self.free

    device = Filling()
    with engine(tmp_path / "root", device=device, min_free_bytes="1 GiB") as made:
        made.store(chain("p", 3))
        device.free = 1 << 20
        until(lambda: made.tier._reclaimer._lease.available == 0)
        assert made.try_store(chain("q", 1)[0]) == "no_room"
        device.free = 1 << 40
        made.store(chain("q", 1))


def test_aborted_and_failed_stores_give_their_room_back(tmp_path):
    device = FailingDevice()
    with engine(tmp_path / "root", device=device, capacity_bytes=8 * on_disk()) as made:
        made.recovered()
        device.faults["pwritev"] = errno.EIO
        for turn in range(15):
            assert made.outcome(chain(f"bad-{turn}", 1)[0]) == "io_error"
        device.faults.clear()
        made.store(chain("p", 3))
        assert made.reasons(chain("p", 3)) == [""] * 4
        until(lambda: ledger_of(made.root)[0] == bytes_under(made.root))


def test_what_one_rank_could_not_store_is_removed_in_the_others(tmp_path):
    with engine(tmp_path / "root", world_size=2) as made:
        made.store(chain("p", 1))
        made.workers[1]._device = FailingDevice(pwritev=errno.EIO)
        assert made.outcome(chain("q", 1)[0]) == "io_error"
        until(lambda: len(object_files(made.root)) == 4)
        until(lambda: ledger_of(made.root)[0] == 4 * on_disk())


def test_a_damaged_or_removed_ledger_is_counted_anew(tmp_path):
    root = tmp_path / "root"
    with engine(root) as made:
        made.store(chain("p", 2))
        (root / "ledger").write_bytes(b"garbage")
        for planned in chain("q", 2):
            made.store_at_last(planned)
        until(lambda: ledger_of(root)[0] == bytes_under(root) == 6 * on_disk())
        (root / "ledger").unlink()
        for planned in chain("r", 2):
            made.store_at_last(planned)
        until(lambda: ledger_of(root)[0] == bytes_under(root) == 9 * on_disk())


def test_bad_files_come_off_the_ledger(tmp_path):
    with engine(tmp_path / "root") as made:
        objects = chain("p", 2)
        made.store(objects)
        os.truncate(made.path(objects[1]), 4096)
        assert made.reasons(objects[1:2]) == ["size"]
        made.tier.drop(objects[1].object_id)
        until(lambda: object_files(made.root) == [made.path(objects[0])])


def test_close_gives_the_lease_back(tmp_path):
    with engine(tmp_path / "root") as made:
        made.store(chain("p", 2))
        assert ledger_of(made.root)[1] > 0
    assert ledger_of(made.root) == (3 * on_disk(), 0)
