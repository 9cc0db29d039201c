# SPDX-License-Identifier: Apache-2.0
"""Whether a directory is a root of the disk tier: by its marker or, where that is lost, by all that lies there."""

import os
import re
import stat

from vllm_overlay.tiers.disk.catalogue.generations import is_catalogue_name
from vllm_overlay.tiers.disk.files.marker import MARKER, NotARootError, marked_journal
from vllm_overlay.tiers.disk.files.mounts import ROLLBACK, file_system_of, journal_of
from vllm_overlay.tiers.disk.files.writer import is_writer_name

HOST_ROOT = re.compile(r"host-[0-9A-Za-z][0-9A-Za-z._-]{0,63}")
LEASE = "lease.json"
_UNLINKED = re.compile(r"\.nfs[0-9a-f]{8,}|\.fuse_hidden[0-9a-f]{8,}")
"""What NFS and FUSE call a file that was removed while somebody has it open, as a cleaner does below a server."""
_IN_WRITER = re.compile(rf"alive|[0-9]{{1,20}}|{_UNLINKED.pattern}")
_WEIGHTS = re.compile(r"weights\.json|\.weights\.json-[0-9a-z_]+")
_FILES = frozenset({MARKER, LEASE, "rebuild.lock", "weights.lock"})
_OF_MOUNTS = frozenset({"lost+found", ".snapshot"})
_SHOWN = 3
_SHOWN_CHARACTERS = 40


def recognise(root: str) -> str:
    """The journal of a root, by its marker; empty where that is yet to be written.

    Changes nothing. Called at start and by tools. Raises NotARootError, and OSError when ``root`` cannot be read.
    """
    names = sorted(os.listdir(root))
    journal = marked_journal(root)  # after the names: a start makes the marker before all else
    here = journal_of(root)
    if journal and journal != here:  # as a server's own disk and the network are
        was, now = ("on a local disk", "over a network") if here == ROLLBACK else ("over a network", "on a local disk")
        raise NotARootError(
            root,
            f"was made {was} and is seen {now} here (its file system is {file_system_of(root)!a}), and processes that "
            "see it in both ways would damage it: set root to the path that it was made by, or to an empty directory",
        )
    if journal or _is_unmarked(root, names):
        return journal
    raise NotARootError(
        root,
        f"is not empty and is no root of the disk tier (it has no valid {MARKER}, but {_some_of(names)}): "
        f"choose an empty directory as the tier's `root`, such as {os.path.join(root, 'vllm-kv')}",
    )


def require_root(root: str) -> None:
    """``recognise`` for tools. To them an empty directory is no root either. Raises the same errors."""
    if not recognise(root) and all(name == MARKER or _says_nothing(name) for name in os.listdir(root)):
        raise NotARootError(root, "is empty: no server has used it as its `root` yet")


def host_roots(root: str) -> list[str]:
    """The directories of hosts below a root that is not local. Raises OSError."""
    names = sorted(os.listdir(root))
    return [path for name in names if HOST_ROOT.fullmatch(name) and os.path.isdir(path := os.path.join(root, name))]


def _is_unmarked(root: str, names: list[str]) -> bool:
    """Whether all is ours: it lost its marker, or nobody has used it yet.

    By names alone: to open and close a catalogue would drop the locks that this process may have on it.
    """
    telling = others = 0
    for name in names:
        try:
            state = os.lstat(os.path.join(root, name))
            if not _is_ours(root, name, state):
                return False
        except FileNotFoundError:  # another process works here
            continue
        if name != MARKER and not _WEIGHTS.fullmatch(name):
            telling += not _says_nothing(name)
        elif state.st_size:  # a marker of no bytes is what a killed start leaves
            others += 1
    return bool(telling) or not others


def _is_ours(root: str, name: str, state: os.stat_result) -> bool:
    if stat.S_ISDIR(state.st_mode):
        if is_writer_name(name):
            return all(map(_IN_WRITER.fullmatch, os.listdir(os.path.join(root, name))))
        return name in _OF_MOUNTS or HOST_ROOT.fullmatch(name) is not None
    is_known = name in _FILES or is_catalogue_name(name) or _WEIGHTS.fullmatch(name) or _UNLINKED.fullmatch(name)
    return bool(is_known) and stat.S_ISREG(state.st_mode)


def _says_nothing(name: str) -> bool:
    """Whether the name may be there whoever has used the directory."""
    return name in _OF_MOUNTS or _UNLINKED.fullmatch(name) is not None


def _some_of(names: list[str]) -> str:
    """Some of the names, for a sentence. Anybody may have chosen them."""
    shown = ", ".join(ascii(name[:_SHOWN_CHARACTERS]) for name in names[:_SHOWN])
    return f"{shown}, ..." if len(names) > _SHOWN else shown
