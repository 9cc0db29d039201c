# SPDX-License-Identifier: Apache-2.0
"""The calls on files that the disk tier makes, all of them through one Device."""

import contextlib
import errno
import functools
import itertools
import logging
import mmap
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from vllm_overlay.tiers.memory import PAGE_BYTES

logger = logging.getLogger(__name__)

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_SEGMENTS = 512
_TEMPORARY = ".tmp."
_TEMPORARY_NAME = re.compile(r"\.tmp\.([0-9a-f]{8})\.([0-9]{1,10})\.([0-9]{1,20})\.[0-9]{1,20}")
_count = itertools.count()


class Device:
    """The operating system's calls, one method each; a test substitutes a device that fails. Thread-safe."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | _SAFE, FILE_MODE)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, segments, offset)

    def pwritev(self, fd: int, segments: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, segments, offset)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, DIRECTORY_MODE)

    def free_bytes(self, path: str) -> int:
        """Free bytes that the file system of ``path`` still has for this user. 0 where it takes no more files."""
        found = os.statvfs(path)
        if found.f_files and not found.f_favail:
            return 0
        return found.f_bavail * found.f_frsize


def _advance(segments: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of ``segments`` once ``num_bytes`` of them are done."""
    for place, segment in enumerate(segments):
        if num_bytes < len(segment):
            return [segment[num_bytes:], *segments[place + 1 :]]
        num_bytes -= len(segment)
    return []


def write_all(device: Device, fd: int, segments: Sequence[memoryview]) -> None:
    """Write the segments, from the file's start. Raises OSError."""
    left = list(segments)
    offset = 0
    while left:
        done = device.pwritev(fd, left[:_MAX_SEGMENTS], offset)
        if done <= 0:
            raise OSError(errno.EIO, "the file takes no more bytes")
        offset += done
        left = _advance(left, done)


def replace_file(device: Device, path: str, content: bytes) -> None:
    """Give a small file this content as a whole. Nothing is synced. After any error it has the one of before."""
    temporary = os.path.join(os.path.dirname(path), temporary_name())
    try:
        fd = device.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            write_all(device, fd, [memoryview(content)])
        finally:
            device.close(fd)
        device.rename(temporary, path)
    except BaseException:
        remove_quietly(device, temporary)
        raise


def read_all(device: Device, fd: int, segments: Sequence[memoryview]) -> bool:
    """Fill the segments, from the file's start. Returns False when the file ends before they are full. Raises
    OSError."""
    left = list(segments)
    offset = 0
    while left:
        done = device.preadv(fd, left[:_MAX_SEGMENTS], offset)
        if done <= 0:
            return False
        offset += done
        left = _advance(left, done)
    return True


def _start_time(pid: int) -> str:
    """When the process started, in clock ticks since boot. Empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@functools.cache
def _pid_space() -> str:
    """Names the boot and the pid namespace in which this process's id means something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        space = socket.gethostname()
    return blake3(space.encode()).hexdigest(4)


def temporary_name() -> str:
    """A file name that no other writer uses: pid space, process, its start, a count."""
    return f"{_TEMPORARY}{_writer(os.getpid())}.{next(_count)}"


@functools.cache
def _writer(pid: int) -> str:
    """This process, for as long as it has that id: not what it was forked from."""
    return f"{_pid_space()}.{pid}.{_start_time(pid)}"


def is_temporary(name: str) -> bool:
    """Whether the name is one that ``temporary_name`` makes. What else begins alike is a stranger's."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def writer_is_alive(name: str) -> bool | None:
    """Whether the process that named this temporary still runs.

    None where nobody here can say: it is of another host, container or boot.
    """
    match = _TEMPORARY_NAME.fullmatch(name)
    if match is None:
        return False
    return None if match[1] != _pid_space() else _start_time(int(match[2])) == match[3]


def make_directory(device: Device, path: str) -> None:
    """Create ``path`` and what lies above it. A directory that is there already is fine. Raises OSError."""
    try:
        device.mkdir(path)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_directory(device, os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            device.mkdir(path)


def remove_quietly(device: Device, path: str) -> None:
    with contextlib.suppress(OSError):
        device.unlink(path)


def is_missing(device: Device, path: str) -> bool:
    """Whether there is no such file. A file that cannot be asked for now is not missing."""
    try:
        device.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def takes_direct_io(device: Device, root: str) -> bool:
    """Whether the file system of ``root`` takes O_DIRECT. Tries a page once, and logs one line when it does not."""
    path = os.path.join(root, temporary_name())
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    try:
        fd = device.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        try:
            write_all(device, fd, [page])
            return read_all(device, fd, [page])
        finally:
            device.close(fd)
    except OSError as error:
        logger.info("disk tier: no O_DIRECT under %s (%s): files go through the page cache", root, error.strerror)
        return False
    finally:
        remove_quietly(device, path)
