# SPDX-License-Identifier: Apache-2.0
"""Which directory is the root: the configured one or, where several hosts may see that, one sub-root a host."""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from vllm_overlay.common.ownership import why_not_ours
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files.device import Device, make_directory
from vllm_overlay.tiers.disk.files.marker import MARKER, NotARootError, marked_journal, write_marker
from vllm_overlay.tiers.disk.files.mounts import ROLLBACK, file_system_of, journal_of, nearest_directory
from vllm_overlay.tiers.disk.files.recognition import HOST_ROOT, recognise
from vllm_overlay.tiers.memory import PAGE_BYTES

_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
_DO_NOT_PASS = {
    errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EINVAL, errno.ELOOP,
    errno.ENAMETOOLONG,
}  # fmt: skip
"""What a wrong path, owner or mode gives. A full disk, a read-only one and a server that is away come back."""
_MACHINE_ID = Path("/etc/machine-id")
logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)


@dataclass(frozen=True, slots=True)
class Root:
    """The directory of the catalogue and of the writers' directories."""

    path: str
    journal: str
    """SQLite's: ``mounts.WRITE_AHEAD`` in a local root, ``mounts.ROLLBACK`` in a host's sub-root, which has a lease."""
    device_number: int
    """Of the file system that it lay on at start. Where that is unmounted, a bare directory may be in its place."""


def choose_root(device: Device, root: str, host_name: str = "") -> Root:
    """``root`` or, if that is not local, this host's own below it. Called at start by both halves.

    Raises ConfigError as ``open_root`` does, and where there are no file locks.
    """
    root = own = os.path.abspath(root)
    journal = journal_of(root)
    open_root(device, root)
    if journal == ROLLBACK:
        own = os.path.join(root, f"host-{_name_of_host(host_name)}")
        logger.info(
            "disk tier: %s lies on %s, which several hosts may see. So this host keeps to %s and shares it with no "
            "other host, and capacity_bytes is a limit for this host alone",
            root, file_system_of(root) or "an unknown file system", own,
        )  # fmt: skip
        open_root(device, own)
    _require_locks(device, own)
    return Root(own, journal, os.stat(nearest_directory(own)).st_dev)


def open_root(device: Device, root: str) -> None:
    """Make or check this directory alone, and mark it if it has no marker.

    Raises ConfigError; then nothing in a directory that was there before has changed. A disk that takes no file now is
    logged: ``is_in_place`` says later whether there is a root.
    """
    root = os.path.abspath(root)
    try:
        make_directory(device, root)
    except OSError as error:
        if error.errno in _DO_NOT_PASS:
            raise ConfigError(
                f"root={root!r} cannot be created ({error.strerror}): set it to a writable directory"
            ) from error
        return _log.warning("make", "disk tier: %s cannot be made now: %s", root, error)
    if _check_directory(root):
        return
    try:
        write_marker(device, root, journal_of(root))
    except OSError as error:
        if error.errno in _DO_NOT_PASS:
            raise ConfigError(f"root={root!r} is not writable: set it to a writable directory of mode 0700") from error
        _log.warning("mark", "disk tier: %s takes no file now: %s", root, error)


def reopen_root(device: Device, root: Root) -> None:
    """Called at the begin of each session: makes and marks what is missing, on the file system of the start alone.

    Another one counts if it has a marker. Raises OSError with a sentence; then there is no root to work in.
    """
    own = root.path
    for directory in (os.path.dirname(own), own) if root.journal == ROLLBACK else (own,):
        if not _counts(root, directory):
            raise OSError(errno.ENODEV, "another file system is there than at the start, and no root on it", directory)
        try:
            open_root(device, directory)
        except ConfigError as error:
            raise OSError(errno.EINVAL, str(error)) from error
    if not _is_marked(root, own):
        raise FileNotFoundError(errno.ENOENT, f"no {MARKER} can be made there now", own)


def is_in_place(root: Root) -> bool:
    """Whether the root is still there, on a file system that counts. Raises OSError when nobody can say."""
    try:
        os.lstat(os.path.join(root.path, MARKER))
        return _counts(root, root.path)
    except (FileNotFoundError, NotADirectoryError):
        return False


def takes_direct_io(device: Device, root: Root) -> bool:
    """Whether the file system takes O_DIRECT. Reads the marker so, and logs one line when it cannot."""
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    try:
        fd = device.open(os.path.join(root.path, MARKER), os.O_RDONLY | os.O_DIRECT)
        try:
            return device.preadv(fd, [page], 0) > 0
        finally:
            device.close(fd)
    except OSError as error:
        logger.info("disk tier: no O_DIRECT under %s (%s): files go through the page cache", root.path, error.strerror)
        return False


def _counts(root: Root, directory: str) -> bool:
    """Whether ``directory``, which need not be there, lies on the file system of the start, or is a marked root."""
    if os.stat(nearest_directory(directory)).st_dev == root.device_number:
        return True
    return _is_marked(root, directory)


def _is_marked(root: Root, directory: str) -> bool:
    with contextlib.suppress(NotARootError):
        return marked_journal(directory) == root.journal
    return False


def _check_directory(root: str) -> str:
    """The journal by the marker; empty where that is yet to be written."""
    try:
        found = os.stat(root)
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"root={root!r} is not a directory: set it to one that this user owns")
        if found.st_uid != os.geteuid() and not os.access(root, os.R_OK | os.X_OK, effective_ids=True):
            raise ConfigError(f"root={root!r} {why_not_ours(found)}: {_what_works(root, found)}")
        journal = recognise(root)
    except NotARootError as error:
        raise ConfigError(f"root={root!r} {error.why}") from error
    except OSError as error:
        raise ConfigError(
            f"root={root!r} cannot be read ({error.strerror}): set it to a readable directory of mode 0700"
        ) from error
    if why := why_not_ours(found):
        raise ConfigError(f"root={root!r} {why}: {_what_works(root, found)}")
    if found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        raise ConfigError(f"root={root!r} is not writable: set it to a writable directory of mode 0700")
    return journal


def _what_works(root: str, found: os.stat_result) -> str:
    """For a directory that is not this user's alone, as a volume is that an orchestrator has mounted."""
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"set it to one below, such as {os.path.join(root, 'vllm-kv')!r}, which is made anew, or its mode to 0700"
        )
    return (
        f"run the server as that user (this is user {os.geteuid()}), or set it to a directory of this user's own, of "
        "mode 0700"
    )


def _require_locks(device: Device, root: str) -> None:
    try:
        fd = device.open(os.path.join(root, MARKER), os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            device.close(fd)
    except OSError as error:  # that another start has the lock now is a good sign
        if error.errno in _NO_LOCKS:
            raise ConfigError(
                f"root={root!r} lies on a file system without file locks: set it to a directory of another one"
            ) from error


def _name_of_host(host_name: str) -> str:
    """The same after a restart. A machine's id is hashed, because it is meant to stay on the machine."""
    if host_name:
        if HOST_ROOT.fullmatch(f"host-{host_name}"):
            return host_name
        raise ConfigError(
            f"host_name={host_name!r} cannot be the name of a directory: set it to at most 64 letters, digits, "
            '".", "_" and "-", such as "node-7"'
        )
    with contextlib.suppress(OSError):
        machine = _MACHINE_ID.read_bytes().strip()
        if re.fullmatch(rb"[0-9a-f]{32}", machine):
            return blake3(machine).hexdigest(8)
    return blake3(socket.gethostname().encode()).hexdigest(8)
