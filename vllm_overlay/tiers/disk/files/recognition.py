# SPDX-License-Identifier: Apache-2.0
"""Whether a directory is a root of the disk tier: by its marker, or as versions before markers left it."""

import os
import re
import stat
from enum import Enum, auto

from vllm_overlay import versions
from vllm_overlay.tiers.disk.catalogue.generations import MEMBERS, is_catalogue, is_catalogue_name
from vllm_overlay.tiers.disk.files.device import is_temporary
from vllm_overlay.tiers.disk.files.manifest import manifest_or_empty
from vllm_overlay.tiers.disk.files.marker import MARKER, NotARootError, marked_version
from vllm_overlay.tiers.disk.files.namespace import FINGERPRINT, IN_USE

LEDGER = "ledger"
LEASES = "leases"
LEDGER_MAGIC = b"HKVLEDG1"
"""The file in which versions before 0.3.0 counted bytes begins with this."""
WEIGHT_FILES = frozenset({"weights.json", "weights.lock"})
HOST_ROOT = re.compile(r"host-[0-9a-f]{16}")
_OWN_LOCK = re.compile(rf"[0-9a-f]{{64}}\.{IN_USE}")
_OF_MOUNTS = frozenset({"lost+found", ".snapshot"})
_SHOWN = 3
_SHOWN_CHARACTERS = 40


class RootKind(Enum):
    """What a directory that may be used as a root is."""

    MARKED = auto()
    OLD = auto()
    """A root that an earlier version made, or one whose marker is damaged."""
    EMPTY = auto()
    """Nothing but what a mount makes, or a start that was killed before it made a marker."""


def recognise(root: str) -> RootKind:
    """Changes nothing. Called at start and by tools. Raises NotARootError, and OSError when ``root`` cannot be read."""
    if (version := marked_version(root)) > 0:
        return RootKind.MARKED if version == versions.DISK_ROOT else RootKind.OLD
    names = sorted(os.listdir(root))
    states = {name: state for name in names if (state := _lstat_or_none(os.path.join(root, name))) is not None}
    if _is_empty(states):
        return RootKind.EMPTY
    if _is_old_root(root, states):
        return RootKind.OLD
    if (
        marked_version(root) == versions.DISK_ROOT
    ):  # another process has just made it: it does so before it makes anything else
        return RootKind.MARKED
    raise NotARootError(
        root,
        f"is not empty and is no root of the disk tier (it has no valid {MARKER}, but {_some_of(names)}): "
        f"choose an empty directory as the tier's `root`, such as {os.path.join(root, 'vllm-kv')}",
    )


def require_root(root: str) -> RootKind:
    """``recognise`` for tools. To them an empty directory is no root either. Raises the same errors."""
    kind = recognise(root)
    if kind is RootKind.EMPTY:
        raise NotARootError(root, "is empty: no server has used it as its `root` yet")
    return kind


def _lstat_or_none(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _is_empty(states: dict[str, os.stat_result]) -> bool:
    return all(_is_of_no_root(name, state, "weights.lock" in states) for name, state in states.items())


def _is_of_no_root(name: str, state: os.stat_result, has_weights_lock: bool) -> bool:
    if name in _OF_MOUNTS:
        return stat.S_ISDIR(state.st_mode)
    is_void = name in (MARKER, "weights.lock") and not state.st_size
    return stat.S_ISREG(state.st_mode) and (
        is_void or is_temporary(name) or (name == "weights.json" and has_weights_lock)
    )


def _is_old_root(root: str, states: dict[str, os.stat_result]) -> bool:
    """Its ledger and a namespace's words say so, or one of them where no name is a stranger's."""
    has_ledger, has_words = _has_ledger(root) or _has_catalogue(states), _has_words(root, states)
    if has_ledger and has_words:
        return True
    return (has_ledger or has_words) and all(_is_own_name(name, state) for name, state in states.items())


def _has_ledger(root: str) -> bool:
    try:
        fd = os.open(os.path.join(root, LEDGER), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:  # since 0.3.0 it is a directory
        return stat.S_ISREG(os.fstat(fd).st_mode) and os.read(fd, len(LEDGER_MAGIC)) == LEDGER_MAGIC
    finally:
        os.close(fd)


def _has_catalogue(states: dict[str, os.stat_result]) -> bool:
    """By names alone: to open and close a catalogue would drop the locks that this process may have on it."""
    has_directories = all(name in states and stat.S_ISDIR(states[name].st_mode) for name in (LEDGER, MEMBERS))
    return has_directories and any(is_catalogue(name) and stat.S_ISREG(states[name].st_mode) for name in states)


def _has_words(root: str, states: dict[str, os.stat_result]) -> bool:
    """Whether a namespace says what it is, here or in a host's sub-root."""
    for name, state in states.items():
        path = os.path.join(root, name)
        if not stat.S_ISDIR(state.st_mode):
            continue
        if FINGERPRINT.fullmatch(name) and manifest_or_empty(path).attention:
            return True
        if HOST_ROOT.fullmatch(name) and any(
            FINGERPRINT.fullmatch(below) and manifest_or_empty(os.path.join(path, below)).attention
            for below in os.listdir(path)
        ):
            return True
    return False


def _is_own_name(name: str, state: os.stat_result) -> bool:
    if stat.S_ISDIR(state.st_mode):
        return name in {LEASES, LEDGER, MEMBERS, *_OF_MOUNTS} or bool(
            FINGERPRINT.fullmatch(name) or HOST_ROOT.fullmatch(name)
        )
    if not stat.S_ISREG(state.st_mode):
        return False
    is_known = name in WEIGHT_FILES | {LEDGER, MARKER} or is_temporary(name) or is_catalogue_name(name)
    return is_known or _OWN_LOCK.fullmatch(name) is not None


def _some_of(names: list[str]) -> str:
    """Some of the names, for a sentence. Anybody may have chosen them."""
    shown = ", ".join(ascii(name[:_SHOWN_CHARACTERS]) for name in names[:_SHOWN])
    return f"{shown}, ..." if len(names) > _SHOWN else shown
