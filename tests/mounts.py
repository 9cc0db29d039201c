# SPDX-License-Identifier: Apache-2.0
"""A small file system in a mount namespace of one's own, so that a test's faults are the kernel's and nobody else's."""

import contextlib
import errno
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

IN_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
"""What a command is begun with to be root of a user namespace of its own, and to mount where nobody else sees it."""
_PIECE = bytes(1 << 16)


@functools.cache
def why_not() -> str:
    """Why nobody may mount here, for a test to say when it is skipped; empty where one may."""
    command = (*IN_NAMESPACE, *_mount_command(Path(tempfile.gettempdir()), "1m"))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return (done.stderr.strip() or f"status {done.returncode} of {command}") if done.returncode else ""


def _mount_command(directory: Path, size: str, max_files: int = 0) -> tuple[str, ...]:
    options = f"size={size},nr_inodes={max_files},mode=0700"  # 0 inodes: no limit
    return ("mount", "-t", "tmpfs", "-o", options, "small", str(directory))


def on_small_disk(directory: Path, size: str, max_files: int = 0) -> tuple[str, ...]:
    """What a command is begun with to find a small file system at ``directory``, which only it sees."""
    mount = shlex.join(_mount_command(directory, size, max_files))
    return (*IN_NAMESPACE, "sh", "-c", f'{mount} && exec "$@"', "sh")


class SmallDisk:
    """The file system at ``directory`` of this process, or of the process ``pid`` that was begun with the above."""

    def __init__(self, directory: Path, pid: int | None = None) -> None:
        self._directory = directory
        self._enter: tuple[str, ...] = ()
        self.path = directory
        if pid is not None:
            self._enter = ("nsenter", f"--target={pid}", "--user", "--mount", "--preserve-credentials")
            self.path = Path(f"/proc/{pid}/root{directory}")

    def _run(self, command: Sequence[str]) -> None:
        subprocess.run([*self._enter, *command], check=True)

    def run(self, command: Sequence[str]) -> int:
        """The exit status of a command that sees the file system as its process does."""
        return subprocess.run([*self._enter, *command]).returncode

    def mount(self, size: str, max_files: int = 0) -> None:
        """Another one, over what is there."""
        self._run(_mount_command(self._directory, size, max_files))

    def unmount(self) -> None:
        """At once, whoever has files of it open."""
        self._run(("umount", "--lazy", str(self._directory)))

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """No file of it can be opened for writing. (An error of the device does that; an operator cannot, while files
        are open for writing. So it is mounted a second time, over itself.)"""
        self._run(("mount", "--bind", str(self._directory), str(self._directory)))
        try:
            self._run(("mount", "-o", "remount,bind,ro", str(self._directory)))
            yield
        finally:
            self.unmount()

    @contextlib.contextmanager
    def gone(self) -> Iterator[None]:
        """It is unmounted, and comes back as it was."""
        kept = str(self._directory.with_name("kept"))
        self._run(("mkdir", "-p", kept))
        self._run(("mount", "--bind", str(self._directory), kept))
        self.unmount()
        try:
            yield
        finally:
            self._run(("mount", "--move", kept, str(self._directory)))

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Somebody else's file takes every byte, and every byte that comes free."""
        path = self.path / "foreign"
        try:
            with open(path, "wb", buffering=0) as file, _again_and_again(lambda: _write_to_the_end(file.fileno())):
                yield
        finally:
            path.unlink()

    @contextlib.contextmanager
    def out_of_files(self) -> Iterator[None]:
        """Somebody else's files take every inode, and every one that comes free."""
        directory = self.path / "foreign"
        directory.mkdir()
        names = (directory / str(number) for number in range(1 << 30))
        try:
            with _again_and_again(lambda: _create_to_the_end(names)):
                yield
        finally:
            shutil.rmtree(directory)

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    @contextlib.contextmanager
    def sampled(self) -> Iterator[list[int]]:
        """The free bytes, again and again."""
        samples: list[int] = []
        with _again_and_again(lambda: samples.append(self.free_bytes())):
            yield samples


def _write_to_the_end(fd: int) -> None:
    size = len(_PIECE)
    while size:
        try:
            os.write(fd, _PIECE[:size])
        except OSError as error:
            assert error.errno == errno.ENOSPC
            size //= 16


def _create_to_the_end(paths: Iterator[Path]) -> None:
    for path in paths:
        try:
            path.touch()
        except OSError as error:
            assert error.errno == errno.ENOSPC
            return


@contextlib.contextmanager
def _again_and_again(step: Callable[[], None]) -> Iterator[None]:
    """Once before this begins, then in a thread every other millisecond until it ends."""
    ends = threading.Event()

    def work() -> None:
        while not ends.wait(0.002):
            step()

    step()
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(work)
        try:
            yield
        finally:
            ends.set()
            done.result()
