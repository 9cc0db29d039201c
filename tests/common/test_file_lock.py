# SPDX-License-Identifier: Apache-2.0
"""A lock is waited for, but not for ever, and who holds it is named."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import tier_pair
from tests.waiting import PATIENCE_S, until
from vllm_overlay.common import file_lock, rate_limited_log
from vllm_overlay.common.file_lock import lock, locked_if_possible, try_lock

HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_another(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock on ``path`` until its input ends."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def is_listed(path: Path) -> bool:
    """Whether this file system's locks can be found in the kernel's list by the file's numbers."""
    found = path.stat()
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino} "
    return name in Path("/proc/locks").read_text()


@pytest.mark.parametrize("shared", [False, True])
def test_a_wait_ends_and_names_the_process_that_is_stopped(tmp_path, shared):
    path = tmp_path / "lock"
    with held_by_another(path) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)
        with pytest.raises(TimeoutError, match=r"locked for .* s by ") as caught:
            lock(str(path), shared, timeout_s=0.05)
        assert caught.value.errno == errno.ETIMEDOUT
        assert str(path) in str(caught.value)
        if is_listed(path):
            assert f"process {holder.pid} (" in str(caught.value) and ", which is stopped: continue or end it)" in str(
                caught.value
            )


@pytest.fixture
def taken_late(tmp_path, monkeypatch, caplog):
    """The lock that a thread got once the other process let go, for which it had to wait. What is called with its path
    happens while it waits."""
    monkeypatch.setattr(file_lock, "_SAID_AFTER_S", 0.0)
    path, got = tmp_path / "lock", []

    def take(meanwhile=lambda path: None) -> int:
        with held_by_another(path) as holder:
            waiting = threading.Thread(target=lambda: got.append(lock(str(path), timeout_s=PATIENCE_S)))
            waiting.start()
            until(lambda: any(str(path) in message for message in caplog.messages), "a word of the wait")
            meanwhile(path)
            assert got == []
            holder.communicate("")
            waiting.join()
        return got[0]

    return take


def test_a_lock_comes_as_soon_as_the_other_lets_go(tmp_path, taken_late):
    fd = taken_late()
    assert try_lock(str(tmp_path / "lock")) is None
    os.close(fd)


def test_a_file_that_was_removed_while_one_waited_is_not_the_one_that_is_locked(tmp_path, taken_late):
    fd = taken_late(Path.unlink)
    assert os.fstat(fd).st_ino == (tmp_path / "lock").stat().st_ino
    os.close(fd)


def test_what_can_do_without_a_lock_does_so_after_a_while(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    monkeypatch.setattr(file_lock, "LONG_WAIT_S", 0.05)
    with held_by_another(path), locked_if_possible(str(path)):
        pass


def test_a_long_wait_is_told_once(tmp_path, monkeypatch, caplog):
    path, seconds = tmp_path / "lock", itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None)
    monkeypatch.setattr(file_lock, "time", clock)
    with held_by_another(path), pytest.raises(TimeoutError):
        lock(str(path), timeout_s=3 * file_lock._SAID_AFTER_S)
    words = [message.partition(", which")[0] for message in caplog.messages if str(path) in message]
    assert words == [f"Waiting for the lock on {path}"]


def test_a_tool_that_is_stopped_with_the_catalogue_locked_holds_no_start_and_stores_come_back(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(rate_limited_log, "INTERVAL_S", 0.0)  # another test may have met the same
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 2))
    with held_by_another(root / "catalogue.lock") as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        with tier_pair(root) as again:
            assert again.try_store(chain("q", 1)[0]) == "no_room"
            until(lambda: any("locked" in each and str(root) in each for each in caplog.messages), "what it waits for")
            os.kill(holder.pid, signal.SIGCONT)
            holder.communicate("")
            again.recovered()
            assert all(again.coverage(chain("p", 2)))
            again.store(chain("q", 1))
