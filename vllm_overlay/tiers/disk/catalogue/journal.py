# SPDX-License-Identifier: Apache-2.0
"""Which of SQLite's journals a catalogue has: the write-ahead log needs memory that all its processes share."""

import os
import re
from pathlib import Path

WRITE_AHEAD = "wal"
ROLLBACK = "delete"
_MOUNTS = Path("/proc/self/mountinfo")
_OF_NETWORKS = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2",
        "orangefs", "panfs", "smb3", "smbfs", "wekafs",
    }
)  # fmt: skip


def journal_mode(root: str) -> str:
    """The write-ahead log, or a rollback journal where several hosts may see the root: that needs locks alone."""
    kind = file_system_type(root)
    return ROLLBACK if kind in _OF_NETWORKS or kind.startswith("fuse.") else WRITE_AHEAD


def file_system_type(path: str) -> str:
    """What is mounted at ``path``, in the kernel's words; empty when nobody can say."""
    wanted = os.path.realpath(path)
    found, longest = "", -1
    try:
        lines = os.fsdecode(_MOUNTS.read_bytes()).split("\n")
    except OSError:
        return ""
    for line in lines:  # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or not kinds:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]).rstrip("/")
        if (wanted == mount or wanted.startswith(f"{mount}/")) and len(mount) >= longest:
            found, longest = kinds[0], len(mount)
    return found
