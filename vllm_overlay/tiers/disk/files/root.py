# SPDX-License-Identifier: Apache-2.0
"""Which directory is the root: the configured one or, where its file system has no locks, one sub-root a host."""

import errno
import fcntl
import logging
import os
import socket
import stat
import tempfile
from pathlib import Path

from blake3 import blake3

from vllm_overlay.common.ownership import why_not_ours
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files.device import Device, make_directory, remove_quietly, temporary_name
from vllm_overlay.tiers.disk.files.marker import NotARootError, write_marker
from vllm_overlay.tiers.disk.files.recognition import HOST_ROOT, RootKind, recognise

_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
_MACHINE_ID = Path("/etc/machine-id")
logger = logging.getLogger(__name__)


def choose_root(device: Device, root: str) -> str:
    """The directory for objects: ``root``, or this host's own below it. Called at start by both halves.

    Raises ConfigError as ``open_root`` does.
    """
    open_root(device, root)
    if _takes_locks(device, root):
        return root
    own = os.path.join(root, f"host-{_this_host()}")
    logger.warning(
        "disk tier: the file system of %s has no file locks. So this host keeps to %s and shares it with no other "
        "host, and capacity_bytes is a limit for this host alone. Its locks are in %s",
        root, own, lock_directory(own),
    )  # fmt: skip
    open_with_locks(device, own)
    if not _takes_locks(device, locks := lock_directory(own)):
        raise ConfigError(
            f"root={root!r} takes no file locks, nor does {locks!r}: set root, or TMPDIR, to a directory of a local "
            "file system"
        )
    return own


def open_with_locks(device: Device, root: str) -> None:
    """``open_root`` for what ``choose_root`` chose, and for the directory of its locks if that is another one."""
    for directory in dict.fromkeys((root, lock_directory(root))):
        open_root(device, directory)


def open_root(device: Device, root: str) -> None:
    """Create or check the root directory, and mark it if it has no marker. Called at start by both halves.

    Raises ConfigError; then nothing in a directory that was there before has changed. A disk that takes no file now is
    logged: ``require_marker`` says later whether there is a root.
    """
    kind = _check_directory(device, root)
    try:
        if kind is not RootKind.MARKED:
            write_marker(device, root)
        else:
            _try_to_write(device, root)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ConfigError(f"root={root!r} is not writable: set it to a writable directory of mode 0700") from error
        logger.warning("disk tier: %s takes no file now: %s", root, error)


def _check_directory(device: Device, root: str) -> RootKind:
    try:
        make_directory(device, root)
        found = os.stat(root)
    except OSError as error:
        raise ConfigError(
            f"root={root!r} cannot be created ({error.strerror}): set it to a writable directory"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"root={root!r} is not a directory: set it to one that this user owns")
    try:
        kind = recognise(root)
    except NotARootError as error:
        raise ConfigError(f"root={root!r} {error.why}") from error
    except OSError as error:
        raise ConfigError(
            f"root={root!r} cannot be read ({error.strerror}): set it to a readable directory of mode 0700"
        ) from error
    if why := why_not_ours(found):
        raise ConfigError(f"root={root!r} {why}: set it to a directory of this user's own, and its mode to 0700")
    return kind


def _try_to_write(device: Device, root: str) -> None:
    path = os.path.join(root, temporary_name())
    try:
        device.close(device.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    finally:
        remove_quietly(device, path)


def lock_directory(root: str) -> str:
    """Where the catalogue of ``root`` lies: in it, or for a host's sub-root on this host's own disk."""
    if not HOST_ROOT.fullmatch(os.path.basename(root)):
        return root
    name = blake3(os.path.realpath(root).encode()).hexdigest(8)
    return os.path.join(tempfile.gettempdir(), f"vllm-overlay-locks-{os.geteuid()}-{name}")


def _takes_locks(device: Device, root: str) -> bool:
    path = os.path.join(root, temporary_name())
    try:
        fd = device.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            device.close(fd)
    except OSError as error:
        return error.errno not in _NO_LOCKS
    finally:
        remove_quietly(device, path)
    return True


def _this_host() -> str:
    """Names this host. The name is the same after a restart, and another one in a container with its own host name."""
    try:
        machine = _MACHINE_ID.read_text().strip()
    except OSError:
        machine = ""
    return blake3(f"{machine}:{socket.gethostname()}".encode()).hexdigest(8)
