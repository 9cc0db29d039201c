# SPDX-License-Identifier: Apache-2.0
"""Mounts for a test: a disk of its own, a FUSE file system that passes all on, and what only looks like one."""

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import until
from vllm_overlay.tiers.disk.files import mounts

OUTAGE_S = 5.0


def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """Every mount seems to be of this kind."""
    proc = tmp_path / "proc"
    proc.mkdir(exist_ok=True)
    real = Path("/proc/self/mountinfo").read_bytes()
    (proc / "mountinfo").write_bytes(re.sub(rb" - [^ ]+ ", b" - %b " % kind.encode(), real))
    if not (proc / "fdinfo").is_symlink():
        (proc / "fdinfo").symlink_to("/proc/self/fdinfo")
    monkeypatch.setattr(mounts, "_PROCESS", proc)


def _mount(*arguments: object) -> None:
    """Skips the test where this machine does not let us."""
    done = subprocess.run(["mount", *map(os.fspath, arguments)], capture_output=True, text=True)  # type: ignore[call-overload]
    if done.returncode:
        pytest.skip(f"this machine mounts nothing for us: {done.stderr.strip()}")


def unmount(path: Path) -> None:
    """At once, whoever has a file open there."""
    subprocess.run(["umount", "--lazy", path], check=True)


class Disk:
    """A file system of its own at ``path``, which can be taken away and put back. Only root can have one."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self._kept = path.with_name(f"{path.name}-kept")
        for directory in (path, self._kept):
            directory.mkdir()
        _mount("-t", "tmpfs", "-o", f"size={num_bytes},mode=0700", "tmpfs", self._kept)
        self.put_back()

    def put_back(self) -> None:
        _mount("--bind", self._kept, self.path)

    def take_away(self) -> None:
        unmount(self.path)

    def let_write(self, may_write: bool) -> None:
        for path in (self.path, self._kept):
            if path.is_mount():
                _mount("-o", "remount,bind," + ("rw" if may_write else "ro"), path)

    def close(self) -> None:
        for path in (self.path, self._kept):
            if path.is_mount():
                unmount(path)


@contextmanager
def disk(path: Path, num_bytes: int = 1 << 20) -> Iterator[Disk]:
    made = Disk(path, num_bytes)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def fuse_mount(source: Path, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``source`` at ``path`` over FUSE, as one of several hosts would see it. Yields the process that serves it."""
    if shutil.which("bindfs") is None:
        pytest.skip("no bindfs, which mounts a directory over FUSE")
    for directory in (source, path):
        directory.mkdir(mode=0o700, exist_ok=True)
    before = path.stat().st_dev
    options = "attr_timeout=0,entry_timeout=0"  # by default the kernel answers for a dead server for a second
    server = subprocess.Popen(["bindfs", "-f", "-o", options, source, path], stderr=subprocess.PIPE)
    try:
        until(lambda: path.stat().st_dev != before or server.poll() is not None, "a FUSE file system")
        if server.poll() is not None:
            assert server.stderr is not None
            pytest.skip(f"this machine mounts no FUSE file system for us: {server.stderr.read().decode().strip()}")
        yield server
    finally:
        server.kill()
        server.wait()
        if os.geteuid():
            subprocess.run(["fusermount3", "-uz", path], capture_output=True)
        else:
            subprocess.run(["umount", "--lazy", path], capture_output=True)


@contextmanager
def outage(server: subprocess.Popen[bytes]) -> Iterator[None]:
    """The server answers nothing for ``OUTAGE_S``, while the body goes on."""
    server.send_signal(signal.SIGSTOP)
    timer = threading.Timer(OUTAGE_S, server.send_signal, (signal.SIGCONT,))
    timer.start()
    try:
        yield
    finally:
        timer.join()
