# SPDX-License-Identifier: Apache-2.0
"""A lock is waited for, but not for ever, and who holds it is named."""

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
from tests.waiting import until
from vllm_overlay.common import file_lock, rate_limited_log
from vllm_overlay.common.file_lock import locked_if_possible, try_lock

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


def waits_for(path: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if str(path) in message]


def test_a_wait_ends_and_names_the_process_that_is_stopped(tmp_path, monkeypatch, caplog):
    path = tmp_path / "lock"
    monkeypatch.setattr(file_lock, "_SAID_AFTER_S", 0.0)
    monkeypatch.setattr(file_lock, "LONG_WAIT_S", 0.05)
    with held_by_another(path) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        os.waitpid(holder.pid, os.WUNTRACED)
        with locked_if_possible(str(path)):
            (said,) = waits_for(path, caplog)
        if is_listed(path):
            assert f"process {holder.pid} (" in said and ", which is stopped: continue or end it)" in said


def test_a_lock_comes_as_soon_as_the_other_lets_go_and_ends_with_the_body(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(file_lock, "_SAID_AFTER_S", 0.0)
    path, got = tmp_path / "lock", []

    def take() -> None:
        with locked_if_possible(str(path)):
            got.append(try_lock(str(path)))

    with held_by_another(path) as holder:
        waiting = threading.Thread(target=take)
        waiting.start()
        until(lambda: waits_for(path, caplog), "a word of the wait")
        assert got == []
        holder.communicate("")
        waiting.join()
    assert got == [None]
    fd = try_lock(str(path))
    assert fd is not None
    os.close(fd)


def test_a_long_wait_is_told_once(tmp_path, monkeypatch, caplog):
    path, seconds = tmp_path / "lock", itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None)
    monkeypatch.setattr(file_lock, "time", clock)
    with held_by_another(path), locked_if_possible(str(path)):
        words = [message.partition(", which")[0] for message in waits_for(path, caplog)]
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
