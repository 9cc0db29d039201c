# SPDX-License-Identifier: Apache-2.0
"""Who holds a catalogue's write lock, for messages."""

import os
from pathlib import Path

_LOCKS = Path("/proc/locks")
_WRITE_LOCK_BYTE = "120"
"""Where SQLite's lock of a write-ahead log's writer lies in the -shm file; part of its file format."""


def find_holder(path: str) -> str:
    """ "process 123", as far as the kernel says so. Opens no file of SQLite's: closing it would drop our own locks."""
    try:
        inode = os.lstat(f"{path}-shm").st_ino
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return "another process"
    for line in lines:  # 1: POSIX  ADVISORY  WRITE 4711 fd:01:1234 120 120
        fields = line.split()
        if len(fields) == 8 and fields[5].endswith(f":{inode}") and fields[6] == _WRITE_LOCK_BYTE:
            return f"process {fields[4]}"
    return "another process"
