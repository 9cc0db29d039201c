# SPDX-License-Identifier: Apache-2.0
"""Root, lease, locks and SQLite on a real file system that is not local: FUSE, whose server is stopped and killed."""

import fcntl
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.tiers.disk.file_systems import fuse_mount, outage
from tests.waiting import until
from vllm_overlay.common.file_lock import is_held
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files import lease as lease_module
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.lease import Lease
from vllm_overlay.tiers.disk.files.mounts import file_system_of
from vllm_overlay.tiers.disk.files.recognition import LEASE
from vllm_overlay.tiers.disk.files.root import Root, choose_root, is_in_place, reopen_root, takes_direct_io


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A directory over FUSE, and the process that serves it."""
    with fuse_mount(tmp_path / "source", tmp_path / "mount") as server:
        yield tmp_path / "mount", server


def opened(path: Path) -> Root:
    return choose_root(Device(), str(path / "root"), "node-7")


def test_it_is_not_local_and_each_host_has_its_sub_root(served):
    path, _ = served
    root = opened(path)
    assert file_system_of(root.path).startswith("fuse")
    assert (root.path, root.journal) == (str(path / "root" / "host-node-7"), "delete")
    assert is_in_place(root)
    takes_direct_io(Device(), root)
    reopen_root(Device(), root)


def test_the_server_itself_must_not_use_it_as_a_local_root(served):
    path, _ = served
    opened(path)
    with pytest.raises(ConfigError, match=r"over a network.*on a local disk"):
        choose_root(Device(), str(path.with_name("source") / "root"))


LOCKER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(3)
"""


def test_locks_hold_among_the_processes_of_a_host(served):
    path = served[0] / "lock"

    def other() -> int:
        return subprocess.run([sys.executable, "-c", LOCKER, path]).returncode

    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert other() == 3
    os.close(fd)
    assert other() == 0


WRITER = """
import sqlite3, sys
with sqlite3.connect(sys.argv[1], timeout=240, isolation_level=None) as db:
    for number in range(150):
        db.execute("INSERT INTO row VALUES (?, ?)", (sys.argv[2], number))
"""


def catalogue(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=240, isolation_level=None, check_same_thread=False)
    assert db.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    db.execute("CREATE TABLE row (writer TEXT, number INTEGER, PRIMARY KEY (writer, number))")
    return db


def test_a_rollback_journal_keeps_the_rows_of_two_processes(served):
    path = served[0] / "catalogue.sqlite"
    with closing(catalogue(path)) as db:
        writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, name]) for name in ("one", "other")]
        assert [writer.wait() for writer in writers] == [0, 0]
        assert db.execute("SELECT count(*) FROM row").fetchone() == (300,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_two_mounts_are_two_machines_even_on_one(served, tmp_path, monkeypatch):
    """As two pods on a node, each with its own mount: their locks do not meet."""
    for name in ("RENEW_S", "SETTLE_S", "_POLL_S"):
        monkeypatch.setattr(lease_module, name, 0.1)
    first = Lease(Device(), opened(served[0]))
    first.take()
    has_ended = threading.Event()
    with fuse_mount(tmp_path / "source", tmp_path / "again"):
        second = Lease(Device(), opened(tmp_path / "again"))

        def renew() -> None:
            while not has_ended.wait(0.1):
                first.renew()

        thread = threading.Thread(target=renew)
        thread.start()
        with pytest.raises(ConfigError, match="set host_name"):
            second.take()
        has_ended.set()
        thread.join()
        first.release()
        second.take()
        second.release()


def during(act: Callable[[], object], meanwhile: Callable[[], object]) -> None:
    """``act`` again and again in a thread, once at least after ``meanwhile`` has ended."""
    failures: list[Exception] = []
    count = [0]
    may_end = threading.Event()

    def run() -> None:
        try:
            while not may_end.is_set():
                act()
                count[0] += 1
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: count[0] > 3 or failures, "a few turns")
    meanwhile()
    before = count[0]
    until(lambda: count[0] > before + 3 or failures, "a few turns after it")
    may_end.set()
    thread.join()
    assert failures == []


def test_after_an_outage_all_goes_on(served, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_S", 0.0)
    path, server = served
    root = opened(path)
    lease = Lease(Device(), root)
    lease.take()
    with closing(catalogue(Path(root.path, "catalogue.sqlite"))) as db:

        def turn() -> None:
            lease.renew()
            assert is_in_place(root)
            db.execute("INSERT INTO row SELECT 'one', count(*) FROM row")

        def stop() -> None:
            with outage(server):
                pass

        during(turn, stop)
        count, largest = db.execute("SELECT count(*), max(number) FROM row").fetchone()
        assert count == largest + 1 > 6
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    lease.release()


def test_a_server_that_died_is_an_outage_until_it_is_mounted_again(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_S", 0.0)
    with fuse_mount(tmp_path / "source", tmp_path / "mount") as server:
        root = opened(tmp_path / "mount")
        lease = Lease(Device(), root)
        lease.take()
        server.kill()
        server.wait()
        with pytest.raises(OSError):
            is_in_place(root)
        with pytest.raises(OSError):
            reopen_root(Device(), root)
        with pytest.raises(OSError):
            lease.renew()
    assert not is_in_place(root)
    with pytest.raises(OSError, match="another file system"):
        reopen_root(Device(), root)
    assert list((tmp_path / "mount").iterdir()) == []
    with fuse_mount(tmp_path / "source", tmp_path / "mount"):
        assert is_in_place(root)
        reopen_root(Device(), root)
        lease.renew()
        other = Lease(Device(), opened(tmp_path / "mount"))  # another engine of this machine
        other.take()
        lease.renew()
        other.release()
        assert is_held(str(Path(root.path, LEASE)))
