# SPDX-License-Identifier: Apache-2.0
"""Locks between processes, each on a file of its own; the end of a process frees them."""

import contextlib
import fcntl
import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

LONG_WAIT_S = 3600.0
"""Whoever holds a lock for longer, while it reads a model's weights, is stopped, or waits for a disk that hangs."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.002
_SAID_AFTER_S = 5.0
_FILE_MODE = 0o600
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
logger = logging.getLogger(__name__)


@contextlib.contextmanager
def locked_if_possible(path: str) -> Iterator[None]:
    """Holds the lock on ``path``; where the file system has no locks, or after ``LONG_WAIT_S``, the body runs without.
    Raises OSError when ``path`` cannot be opened."""
    fd = os.open(path, _OPEN, _FILE_MODE)
    try:
        with contextlib.suppress(OSError):
            _wait_for_lock(fd, path)
        yield
    finally:
        os.close(fd)


def _wait_for_lock(fd: int, path: str) -> None:
    """It asks again and again, because no thread can be called back from a lock that waits."""
    started, pause, is_said = time.monotonic(), _FIRST_PAUSE_S, False
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - started
            if waited >= LONG_WAIT_S:
                return
            if not is_said and waited > _SAID_AFTER_S:
                is_said = True
                logger.warning("Waiting for the lock on %s, which %s holds", path, _holder_of(fd))
            time.sleep(min(pause * random.uniform(0.5, 1.0), LONG_WAIT_S - waited))
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _holder_of(fd: int) -> str:
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


def try_lock(path: str) -> int | None:
    """The descriptor that holds the lock on ``path`` until it is closed; None at once when anybody holds it in any way.
    Raises any other OSError."""
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
