# SPDX-License-Identifier: Apache-2.0
"""Locks between processes, each on a file of its own; the end of a process frees them."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

_FILE_MODE = 0o600
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def lock(path: str, shared: bool = False) -> int:
    """The descriptor that holds the lock on ``path`` until it is closed. Waits; raises OSError."""
    while True:
        fd = os.open(path, _OPEN, _FILE_MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the file was removed while we waited: lock the new one


@contextlib.contextmanager
def locked_if_possible(path: str) -> Iterator[None]:
    """Holds the lock on ``path``; where the file system has no locks, the body runs without. Raises OSError when
    ``path`` cannot be opened."""
    fd = os.open(path, _OPEN, _FILE_MODE)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def try_lock(path: str) -> int | None:
    """As ``lock``, but None at once when anybody holds it, in whatever way."""
    fd = os.open(path, _OPEN, _FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_in_place(path: str, fd: int) -> bool:
    """Whether ``path`` still is the file that ``fd`` was opened as. Raises OSError when nobody can say."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(found, os.fstat(fd))


def is_held(path: str) -> bool:
    """Whether anybody holds a lock on ``path``. Creates nothing: a file that is not there holds none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
