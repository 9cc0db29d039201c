# SPDX-License-Identifier: Apache-2.0
"""Locks between processes, each on a file of its own; the end of a process frees them."""

import contextlib
import errno
import fcntl
import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_WAIT_S = 30.0
"""Whoever holds a lock for longer is stopped, or waits for a disk that hangs."""
LONG_WAIT_S = 3600.0
"""The same where the holder reads a model's weights."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.002
_SAID_AFTER_S = 5.0
_FILE_MODE = 0o600
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
logger = logging.getLogger(__name__)


def lock(path: str, shared: bool = False, timeout_s: float | None = None) -> int:
    """The descriptor that holds the lock on ``path`` until it is closed. Waits at most ``timeout_s`` (None:
    ``LOCK_WAIT_S``). Raises TimeoutError, which says whom it has waited for, and any other OSError."""
    deadline = time.monotonic() + (LOCK_WAIT_S if timeout_s is None else timeout_s)
    while True:
        fd = os.open(path, _OPEN, _FILE_MODE)
        try:
            wait_for_lock(fd, path, shared, deadline)
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the file was removed while we waited: lock the new one


def wait_for_lock(fd: int, path: str, shared: bool = False, deadline: float | None = None) -> None:
    """Locks an open file. ``path`` is for messages, ``deadline`` on the monotonic clock; raises as ``lock`` does. It
    asks again and again, because no thread can be called back from a lock that waits."""
    started = time.monotonic()
    deadline = started + LOCK_WAIT_S if deadline is None else deadline
    pause, is_said = _FIRST_PAUSE_S, False
    while True:
        try:
            return fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"locked for {now - started:.1f} s by {holder_of(fd)}", path
                ) from None
            if not is_said and now - started > _SAID_AFTER_S:
                is_said = True
                logger.warning("Waiting for the lock on %s, which %s holds", path, holder_of(fd))
            time.sleep(min(pause * random.uniform(0.5, 1.0), max(0.0, deadline - now)))
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def holder_of(fd: int) -> str:
    """Who holds a lock on this file, in words, as far as this host and pid namespace can say."""
    found = os.fstat(fd)
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == file:
                return _name_of(int(fields[4]))
    return "a process that cannot be seen from here"


def _name_of(pid: int) -> str:
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").partition("(")[2].rpartition(")")
        return f"process {pid} ({name}{', which is stopped: continue or end it' if rest.split()[0] in 'Tt' else ''})"
    except (OSError, IndexError):
        return f"process {pid}"


@contextlib.contextmanager
def locked_if_possible(path: str) -> Iterator[None]:
    """Holds the lock on ``path``; where the file system has no locks, or after ``LONG_WAIT_S``, the body runs without.
    Raises OSError when ``path`` cannot be opened."""
    fd = os.open(path, _OPEN, _FILE_MODE)
    try:
        with contextlib.suppress(OSError):
            wait_for_lock(fd, path, deadline=time.monotonic() + LONG_WAIT_S)
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
    try:
        return os.path.samestat(found, os.fstat(fd))
    except OSError:  # the path answers, and what was opened is dead: its server came back
        return False


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
