# SPDX-License-Identifier: Apache-2.0
"""A writer is one life of one engine: a directory with a name that never comes again, and who lives in it.

A writer lives while anybody holds the lock on its file ``alive``: the scheduler, which makes it, or a rank, which only
takes part. Files are numbers. What they hold is said by their headers and by the catalogue's rows, not by their names.
"""

import contextlib
import fcntl
import os
import re
import secrets
import weakref
from collections.abc import Iterator

from vllm_overlay.common.file_lock import is_in_place
from vllm_overlay.tiers.disk.catalogue import File
from vllm_overlay.tiers.disk.files.device import Device

ALIVE = "alive"
FILES_A_DIRECTORY = 4096
MAX_NUMBER = (1 << 40) - 1
_NAME = re.compile(r"[0-9a-f]{16}")
_FILE_NAME = re.compile(r"(0|[1-9][0-9]{0,12})\.r(0|[1-9][0-9]{0,3})")
_ATTEMPTS = 8
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


def is_writer_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def path_of(root: str, file: File, rank: int) -> str:
    """The file of one rank of an object."""
    directory = os.path.join(root, file.writer, str(file.number // FILES_A_DIRECTORY))
    return os.path.join(directory, f"{file.number}.r{rank}")


def parse_name(name: str) -> tuple[int, int] | None:
    """Number and rank of a file. None when it is no object's."""
    match = _FILE_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match and int(match[1]) <= MAX_NUMBER else None


def writers_under(root: str) -> list[str]:
    """The names of all writers that have a directory; a link to one is not followed. Raises OSError."""
    with os.scandir(root) as entries:
        return sorted(each.name for each in entries if is_writer_name(each.name) and each.is_dir(follow_symlinks=False))


def directories_under(root: str, writer: str) -> list[str]:
    """The directories that a writer's files lie in. Raises OSError, but for one that is gone."""
    try:
        with os.scandir(os.path.join(root, writer)) as entries:
            return sorted(each.path for each in entries if each.name.isdecimal() and each.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def alive_path(root: str, writer: str) -> str:
    return os.path.join(root, writer, ALIVE)


class Life:
    """A share in the life of a writer. Held until ``end``, and by no child of a fork."""

    def __init__(self, root: str, writer: str, fd: int) -> None:
        self.writer = writer
        self._path = alive_path(root, writer)
        self._fd = fd
        _held.add(self)

    def is_in_place(self) -> bool:
        """Whether others still see that the writer lives. Raises OSError when nobody can say."""
        return self._fd >= 0 and is_in_place(self._path, self._fd)

    def end(self) -> None:
        """Once nobody holds a share, the writer is dead."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # of a server that died: the number is free all the same
                os.close(fd)


_held: "weakref.WeakSet[Life]" = weakref.WeakSet()


def _leave_lives_to_parent() -> None:
    """A child holds its parent's locks too, and would keep them after the parent's end."""
    for life in list(_held):
        life.end()


os.register_at_fork(after_in_child=_leave_lives_to_parent)


def begin_life(root: str, device: Device) -> Life:
    """A new writer. Called by the scheduler's half alone. Raises OSError."""
    for _ in range(_ATTEMPTS):  # who finds it before its lock may take it for a dead one
        writer = secrets.token_hex(8)
        device.mkdir(os.path.join(root, writer))
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(alive_path(root, writer), _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
            life = _locked(root, writer, fd)
            if life is not None:
                return life
    raise OSError(f"no writer of {root} can be made: somebody removes what is made there")


def share_life(root: str, writer: str) -> Life | None:
    """Called by a rank before it writes anything of that writer. None when the writer is dead. Raises OSError."""
    try:
        fd = os.open(alive_path(root, writer), _OPEN)
    except FileNotFoundError:
        return None
    return _locked(root, writer, fd)


def _locked(root: str, writer: str, fd: int) -> Life | None:
    """Who buries the writer holds the lock alone, and then there is no such file any more."""
    held = None
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if is_in_place(alive_path(root, writer), fd):
                held = Life(root, writer, fd)
    finally:
        if held is None:
            os.close(fd)
    return held


@contextlib.contextmanager
def dead(root: str, writer: str, device: Device) -> Iterator[bool]:
    """Whether the writer is dead. If so, no rank of it that wakes up late finds it alive from now on. Raises OSError.

    A directory without the file may be one that is just being made. Then what was listed before the file is looked for
    once more is nobody's.
    """
    path = alive_path(root, writer)
    try:
        fd = os.open(path, _OPEN)
    except (FileNotFoundError, NotADirectoryError):
        yield True
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        device.unlink(path)
        yield True
    finally:
        os.close(fd)
