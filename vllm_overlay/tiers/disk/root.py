# SPDX-License-Identifier: Apache-2.0
"""Where objects and locks lie: both under the root or, where its file system has no locks, one sub-root a host."""

import errno
import fcntl
import logging
import os
import re
import socket
import tempfile
from pathlib import Path

from blake3 import blake3

from vllm_overlay.tiers.disk.device import Device, open_root, remove_quietly, temporary_name
from vllm_overlay.tiers.disk.namespace import IN_USE

_HOST_ROOT = re.compile(r"host-[0-9a-f]{16}")
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
        "disk tier: the file system of %s has no file locks: this host keeps to %s, shares it with no other host, and "
        "capacity_bytes is its limit for this host alone (locks are in %s)",
        root, own, lock_directory(own),
    )  # fmt: skip
    open_root(device, own)
    open_root(device, lock_directory(own))
    return own


def lock_directory(root: str) -> str:
    """Where the ledger and the leases of ``root`` lie: there, but for a host's sub-root on this host's own disk."""
    if not _HOST_ROOT.fullmatch(os.path.basename(root)):
        return root
    name = blake3(os.path.realpath(root).encode()).hexdigest(8)
    return os.path.join(tempfile.gettempdir(), f"vllm-overlay-locks-{os.geteuid()}-{name}")


def in_use_path(root: str, fingerprint: str) -> str:
    """The file that every process which serves the namespace keeps locked."""
    locks = lock_directory(root)
    return os.path.join(root, fingerprint, IN_USE) if locks == root else os.path.join(locks, f"{fingerprint}.{IN_USE}")


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
    """The same after a restart, and another in a container that has a name of its own."""
    try:
        machine = _MACHINE_ID.read_text().strip()
    except OSError:
        machine = ""
    return blake3(f"{machine}:{socket.gethostname()}".encode()).hexdigest(8)
