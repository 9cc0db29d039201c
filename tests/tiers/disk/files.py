# SPDX-License-Identifier: Apache-2.0
"""What lies under a root: files, their bytes, and what the catalogue says of them."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.disk.objects import OBJECT
from vllm_overlay.planner.objects import SNAPSHOT_TAG
from vllm_overlay.tiers.disk.catalogue import Catalogue, Damaged, Superseded
from vllm_overlay.tiers.disk.catalogue.generations import newest
from vllm_overlay.tiers.disk.files.format import file_bytes
from vllm_overlay.tiers.disk.files.writer import parse_name, path_of


def _files_under(root: Path) -> Iterator[Path]:
    """Files in the places of objects, while others may remove files and directories."""
    for directory, _, names in os.walk(root):
        if len(Path(directory).relative_to(root).parts) == 2:
            yield from (Path(directory, name) for name in names)


def object_files(root: Path) -> list[Path]:
    return sorted(path for path in _files_under(root) if parse_name(path.name))


def snapshot_files(root: Path, rank: int) -> set[Path]:
    """Those of one rank that the catalogue knows."""
    with contextlib.closing(Catalogue(str(root))) as catalogue:
        known = [item for found in catalogue.load_all() for item in found]
    return {Path(path_of(str(root), item.file, rank)) for item in known if item.object_id.tag.startswith(SNAPSHOT_TAG)}


def writers_of(root: Path) -> list[str]:
    """The names of all lives that have left something."""
    return sorted({path.relative_to(root).parts[0] for path in object_files(root)})


def bytes_under(root: Path) -> int:
    """Bytes of all objects that were there at one moment, while others may write and remove them: one
    walk alone would count what goes behind it and what comes before it. What two walks see was there between them."""
    first, second = _sizes_under(root), _sizes_under(root)
    return sum(min(size, second[file]) for file, size in first.items() if file in second)


def _sizes_under(root: Path) -> dict[tuple[int, int], int]:
    """By inode and time of the last write (an inode's number is used again)."""
    sizes = {}
    for path in _files_under(root):
        try:
            status = path.lstat()
        except OSError as error:
            assert error.errno == errno.ENOENT
        else:
            sizes[status.st_ino, status.st_mtime_ns] = status.st_size
    return sizes


def on_disk(num_bytes: int = OBJECT) -> int:
    return file_bytes(num_bytes)


def counted(root: Path) -> tuple[int, int]:
    """(bytes of objects and of files about to be unlinked, bytes granted) as the catalogue has them; (-1, -1) while it
    is not there, damaged or being replaced."""
    if not newest(str(root)):
        return -1, -1
    try:
        with contextlib.closing(Catalogue(str(root))) as catalogue:
            totals = catalogue.totals()
    except (Damaged, Superseded):
        return -1, -1
    return totals.object_bytes + totals.removing_bytes, totals.granted_bytes


def lose_catalogue(root: Path) -> None:
    """As if it had never been made. Nobody has it open."""
    for path in root.glob("catalogue*"):
        path.unlink()


def make_as_large_as_possible(path: Path) -> None:
    """A sparse file of 2^63 bytes or, where the file system takes none, of some TiB."""
    path.touch()
    for num_bytes in ((1 << 63) - 1, (1 << 44) - (1 << 20), 1 << 42):
        with contextlib.suppress(OSError):
            return os.truncate(path, num_bytes)
    pytest.skip("this file system takes no file of 4 TiB")
