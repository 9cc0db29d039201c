# SPDX-License-Identifier: Apache-2.0
"""Directories that are no roots, and what tells whether anything in them has changed."""

import shutil
import stat
from pathlib import Path

from tests.tiers.disk.files import lose_catalogue
from vllm_overlay import versions
from vllm_overlay.tiers.disk.files.device import temporary_name
from vllm_overlay.tiers.disk.files.marker import MARKER, encode_marker
from vllm_overlay.tiers.disk.files.recognition import LEDGER_MAGIC

_NUM_SLOTS = 256

KINDS = ("project", "ledger", "temporaries", "hex", "weights", "world", "marker_link", "marker_damaged")


def make_foreign(path: Path, kind: str) -> Path:
    """A directory of somebody else's, of a kind that looks like a root in one way."""
    path.mkdir()
    match kind:
        case "project":
            (path / "main.c").write_text("int main;")
        case "ledger":
            (path / "ledger").write_text("2026-01-01 * opening balances")
        case "temporaries":
            (path / ".tmp.foo").write_text("mine")
        case "hex":  # as Docker's directory of containers
            (path / ("5" * 64)).mkdir()
            (path / ("5" * 64) / "config.v2.json").write_text("{}")
        case "weights":
            (path / "weights.json").write_text("{}")
        case "world":
            (path / "X11-unix").mkdir()
            path.chmod(0o1777)
        case "marker_link":
            (path.parent / "elsewhere").write_text("{}")
            (path / "vllm-overlay-root.json").symlink_to(path.parent / "elsewhere")
        case "marker_damaged":
            (path / "vllm-overlay-root.json").write_text('{"format": "mine"}')
    return path


def state_of(top: Path) -> dict[str, tuple[object, ...]]:
    """Mode, owner, times and bytes of a directory and of all below it."""
    return {str(path.relative_to(top)): _state_of(path) for path in [top, *sorted(top.rglob("*"))]}


def _state_of(path: Path) -> tuple[object, ...]:
    found = path.lstat()
    content = path.read_bytes() if stat.S_ISREG(found.st_mode) else None
    return found.st_mode, found.st_uid, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, content


def contents_of(top: Path) -> dict[str, tuple[object, ...]]:
    """Mode, owner and bytes of all below a directory, but SQLite's -shm, in which readers write."""
    paths = (path for path in sorted(top.rglob("*")) if not path.name.endswith("-shm"))
    return {str(path.relative_to(top)): _content_of(path) for path in paths}


def _content_of(path: Path) -> tuple[object, ...]:
    found = path.lstat()
    return found.st_mode, found.st_uid, path.read_bytes() if stat.S_ISREG(found.st_mode) else None


def forget_marker(root: Path) -> None:
    (root / MARKER).unlink(missing_ok=True)


def make_old(root: Path, has_marker: bool = False) -> None:
    """Make of a root what a version before 0.3.0 would have left of it. Nobody has it open.

    Such a version counted bytes in a file, and knew its processes by the locks on ``leases/<slot>``. Later ones of
    them had a marker, of version 1.
    """
    forget_marker(root)
    if has_marker:
        words = encode_marker().replace(b'"version": %d' % versions.DISK_ROOT, b'"version": 1')
        (root / MARKER).write_bytes(words)
        (root / MARKER).chmod(0o600)
    lose_catalogue(root)
    for name in ("ledger", "members"):
        shutil.rmtree(root / name, ignore_errors=True)
    _write_ledger(root)


def make_counted_root(path: Path) -> Path:
    """An old root in which nothing is stored yet: a ledger, its leases, a temporary that a kill left."""
    path.mkdir(mode=0o700)
    _write_ledger(path)
    (path / temporary_name()).touch()
    return path


def _write_ledger(root: Path) -> None:
    (root / "ledger").write_bytes(LEDGER_MAGIC + bytes(8 * (1 + _NUM_SLOTS) + 16))
    (root / "leases").mkdir()
    (root / "leases" / "0").touch()
