# SPDX-License-Identifier: Apache-2.0
"""The file system that a disk tier will lie on: what it holds, and what a tier may have of it."""

import os
from dataclasses import dataclass

from vllm_overlay.config import GIB, KIB, MIB, TIB
from vllm_overlay.tiers.disk.files.mounts import nearest_directory


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk tier as it is asked for, and the file system of its root."""

    root: str
    capacity_bytes: int
    min_free_bytes: int
    least_bytes: int
    """A capacity below it is refused."""
    volume_bytes: int
    """What is free on the file system, or all of it where the root is there: what of it is the root's is not known."""

    @property
    def usable_bytes(self) -> int:
        return max(0, self.volume_bytes - self.min_free_bytes)


def volume_bytes(root: str) -> int:
    """Of ``Disk``. ``root`` need not be there yet. Raises OSError."""
    found = os.statvfs(nearest_directory(root))
    return (found.f_blocks if os.path.isdir(root) else found.f_bavail) * found.f_frsize


def as_argument(num_bytes: int) -> str:
    """A size as one word that ``parse_bytes`` reads, at most ``num_bytes`` and near it: ``"1862GiB"``."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= 10 * unit or (num_bytes >= unit and num_bytes % unit == 0):
            return f"{num_bytes // unit}{name}"
    return str(num_bytes)
