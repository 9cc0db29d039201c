# SPDX-License-Identifier: Apache-2.0
"""On which file system a directory lies, and so whether it is this machine's own or may be seen by several hosts."""

import os
import re
from pathlib import Path

WRITE_AHEAD = "wal"
"""SQLite's write-ahead log. It needs memory that all processes share, so all of one machine."""
ROLLBACK = "delete"
_PROCESS = Path("/proc/self")
_MOUNT_ID = re.compile(rb"^mnt_id:\s*([0-9]+)$", re.MULTILINE)
_LOCAL = {
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay", "ramfs", "reiserfs", "tmpfs",
    "xfs", "zfs",
}  # fmt: skip


def journal_of(path: str) -> str:
    """The journal of a catalogue in this directory, or one that will be made there.

    A file system that is not known to be local gets a rollback journal, which needs locks alone.
    """
    return WRITE_AHEAD if file_system_of(path) in _LOCAL else ROLLBACK


def file_system_of(path: str) -> str:
    """The type of the file system that ``path`` lies on, in the kernel's words; empty when nobody can say.

    The kernel names the mount of an open file by its number, so no path of the list of mounts is read.
    """
    try:
        fd = os.open(nearest_directory(path), os.O_PATH | os.O_CLOEXEC)
        try:
            number = _MOUNT_ID.search((_PROCESS / "fdinfo" / str(fd)).read_bytes())
        finally:
            os.close(fd)
        mounts = (_PROCESS / "mountinfo").read_bytes().split(b"\n")
    except OSError:
        return ""
    for line in mounts:  # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw
        before, _, after = line.partition(b" - ")
        if number is not None and before.split(b" ")[0] == number[1]:
            return os.fsdecode(after.split(b" ")[0])
    return ""


def nearest_directory(path: str) -> str:
    """``path`` or, while that is not there, the nearest above it that is."""
    path = os.path.abspath(path)
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path
