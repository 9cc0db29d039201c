# SPDX-License-Identifier: Apache-2.0
"""Directories that are no roots, and what tells whether anything in them has changed."""

import stat
from pathlib import Path

from vllm_overlay.tiers.disk.files.marker import MARKER

KINDS = ("project", "members", "temporaries", "hex", "writer", "weights", "world", "marker_link", "marker_damaged")


def make_foreign(path: Path, kind: str) -> Path:
    """A directory of somebody else's, of a kind that looks like a root in one way."""
    path.mkdir()
    match kind:
        case "project":
            (path / "main.c").write_text("int main;")
        case "members":  # of a club
            (path / "members").mkdir()
            (path / "members" / "0").write_text("the chair")
        case "temporaries":
            (path / ".tmp.foo").write_text("mine")
        case "hex":  # as Docker's directory of containers
            (path / ("5" * 64)).mkdir()
            (path / ("5" * 64) / "config.v2.json").write_text("{}")
        case "writer":  # of no objects
            (path / ("5" * 16)).mkdir()
            (path / ("5" * 16) / "novel.txt").write_text("It was a dark")
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
