# SPDX-License-Identifier: Apache-2.0
"""The calls on files that the disk tier makes, all of them through one Device."""

import contextlib
import errno
import fcntl
import os
import resource
from collections.abc import Sequence

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_SEGMENTS = 512
_DESCRIPTORS = 1024
"""More than an engine with tiers has open."""


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

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, DIRECTORY_MODE)

    def total_bytes(self, path: str) -> int:
        """What the file system of ``path`` has in all, but for what only its superuser may use."""
        found = os.statvfs(path)
        return (found.f_blocks - found.f_bfree + found.f_bavail) * found.f_frsize

    def free_bytes(self, path: str) -> int:
        """Free bytes that the file system of ``path`` still has for this user. 0 where it takes no more files."""
        found = os.statvfs(path)
        if found.f_files and not found.f_favail:
            return 0
        return found.f_bavail * found.f_frsize


def make_room_for_descriptors() -> None:
    """Called by each half of the tier before the engine runs. A second call in a process changes nothing.

    Linux enlarges a process's table of open files when the table is full. The thread that opens one more file waits for
    a grace period of RCU then (``expand_fdtable``). Ranks that poll each other with ``sched_yield`` on every core can
    draw that out for as long as they have nothing else to do: a load from disk has waited 30 seconds.
    """
    most = min(_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with contextlib.suppress(OSError), open(os.devnull) as file:  # all are taken: the table has its size
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, most - 1))


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


def read_up_to(device: Device, fd: int, segments: Sequence[memoryview], enough: int) -> int:
    """Fill the segments from the file's begin, as far as the file goes, which is to be ``enough`` bytes; returns how
    far that is, at most. Raises OSError."""
    left = list(segments)
    offset = 0
    while left and (done := device.preadv(fd, asked := left[:_MAX_SEGMENTS], offset)) > 0:
        offset += done
        if offset >= enough and done < sum(map(len, asked)):
            break  # and spares the call that would say so
        left = _advance(left, done)
    return offset


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
