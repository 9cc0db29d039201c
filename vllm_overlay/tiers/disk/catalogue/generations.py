# SPDX-License-Identifier: Apache-2.0
"""Which file is the catalogue of a root: the one with the highest number.

A damaged catalogue is never written over, because processes may have it open: the next one is a new file. The old one
is unlinked then. Who has it open finds that out at the next call.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator

from vllm_overlay.common.file_lock import try_lock
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.catalogue import schema
from vllm_overlay.tiers.disk.catalogue.errors import Busy, CatalogueError, Damaged, translated

_LOCK = "catalogue.lock"
_NEW = "catalogue-new"
_NAME = re.compile(r"catalogue-([1-9][0-9]{0,8})\.sqlite")
_FILE = re.compile(r"catalogue-[1-9][0-9]{0,8}\.sqlite(?:-wal|-shm|-journal)?")
_COMPANIONS = ("", "-wal", "-shm", "-journal")
MAX_GENERATION = 999_999_999
DEFAULT_TIMEOUT_S = 10.0
_POLL_S = 0.005


def path_of(root: str, generation: int) -> str:
    """The file of one generation."""
    return os.path.join(root, f"catalogue-{generation}.sqlite")


def is_catalogue_name(name: str) -> bool:
    """Whether this package gives that name to a file of a root."""
    return name in (_LOCK, *(_NEW + companion for companion in _COMPANIONS)) or _FILE.fullmatch(name) is not None


def newest(root: str) -> int:
    """The highest number that a file has; 0 when there is none. Raises OSError."""
    return max(_generations(root), default=0)


def _generations(root: str) -> list[int]:
    return [int(match[1]) for name in os.listdir(root) if (match := _NAME.fullmatch(name))]


def check_root(root: str) -> None:
    """Raise ConfigError unless it is, or leads to, a directory of this user; OSError. It is made by who marks it."""
    found = os.stat(root)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"{root!r} must be a directory of this user: remove it, or set root to another one")


@contextlib.contextmanager
def root_locked(root: str, timeout_s: float) -> Iterator[None]:
    """One process at a time begins or removes generations. Raises Busy, OSError."""
    deadline = time.monotonic() + timeout_s
    path = os.path.join(root, _LOCK)
    while (fd := try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise Busy(f"another process keeps {path} locked")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(fd)


def ensure(root: str, journal: str) -> int:
    """The number of the newest generation, which is made where there is none. Call with the root locked."""
    if not (found := newest(root)):
        return _begin(root, 1, journal)
    _remove_older(root, found)
    return found


def replace_damaged(root: str, generation: int, journal: str = "wal", timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Begin a new catalogue after ``Damaged``, whose ``generation`` this takes, unless somebody has done so already.

    Processes that have the old one open get Superseded at their next call. The new one must be rebuilt. It does not
    know what they were granted, so its sums lack the files that they are writing now. Raises CatalogueError.
    """
    with translated(generation), root_locked(root, timeout_s):
        if newest(root) <= generation:
            _begin(root, generation + 1, journal)


def _begin(root: str, generation: int, journal: str) -> int:
    """Put an empty catalogue in place at once, whoever dies when."""
    if generation > MAX_GENERATION:
        raise CatalogueError(f"{root} has no number left for a catalogue: remove catalogue-*.sqlite there")
    temporary = os.path.join(root, _NEW)
    _unlink(temporary)
    schema.create(temporary, journal)
    _unlink(path_of(root, generation))  # SQLite would play the journal of a file that was removed into this one
    os.rename(temporary, path_of(root, generation))
    _remove_older(root, generation)
    return generation


def check_file(path: str, generation: int) -> os.stat_result:
    """Never opens the file: closing a descriptor of it would drop the locks that SQLite has on it in this process.

    Raises Damaged for a link, something else than a file and another user's file; OSError.
    """
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise Damaged("it is no regular file", generation)
    if found.st_uid != os.geteuid():
        raise Damaged("it belongs to another user", generation)
    return found


def _remove_older(root: str, generation: int) -> None:
    for older in _generations(root):
        if older < generation:
            with contextlib.suppress(OSError):  # something that is no file is left to people
                _unlink(path_of(root, older))


def _unlink(path: str) -> None:
    for companion in _COMPANIONS:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + companion)
