# SPDX-License-Identifier: Apache-2.0
"""Whether a directory is a root of the disk tier: by its marker or, where that is lost, by all that lies there."""

import os
import re
import stat
from enum import Enum, auto

from vllm_overlay.tiers.disk.catalogue.generations import MEMBERS, is_catalogue, is_catalogue_name
from vllm_overlay.tiers.disk.files.device import is_temporary
from vllm_overlay.tiers.disk.files.marker import MARKER, NotARootError, marked_version
from vllm_overlay.tiers.disk.files.namespace import FINGERPRINT

WEIGHT_FILES = frozenset({"weights.json", "weights.lock"})
HOST_ROOT = re.compile(r"host-[0-9a-f]{16}")
_OF_MOUNTS = frozenset({"lost+found", ".snapshot"})
_SHOWN = 3
_SHOWN_CHARACTERS = 40


class RootKind(Enum):
    """What a directory that may be used as a root is."""

    MARKED = auto()
    UNMARKED = auto()
    """A root whose marker is damaged, or was removed."""
    EMPTY = auto()
    """Nothing but what a mount makes, or a start that was killed before it made a marker."""


def recognise(root: str) -> RootKind:
    """Changes nothing. Called at start and by tools. Raises NotARootError, and OSError when ``root`` cannot be read."""
    if marked_version(root):
        return RootKind.MARKED
    names = sorted(os.listdir(root))
    states = {name: state for name in names if (state := _lstat_or_none(os.path.join(root, name))) is not None}
    if _is_empty(states):
        return RootKind.EMPTY
    if marked_version(root):  # another process has just made it: it does so before it makes anything else
        return RootKind.MARKED
    if _has_lost_its_marker(states):
        return RootKind.UNMARKED
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


def _has_lost_its_marker(states: dict[str, os.stat_result]) -> bool:
    """By names alone: to open and close a catalogue would drop the locks that this process may have on it."""
    directories = {name for name, state in states.items() if stat.S_ISDIR(state.st_mode)}
    has_objects = any(map(FINGERPRINT.fullmatch, directories)) or any(map(is_catalogue, states.keys() - directories))
    return MEMBERS in directories and has_objects and all(_is_own_name(name, state) for name, state in states.items())


def _is_own_name(name: str, state: os.stat_result) -> bool:
    if stat.S_ISDIR(state.st_mode):
        is_ours = FINGERPRINT.fullmatch(name) or HOST_ROOT.fullmatch(name)
        return bool(is_ours) or name in {MEMBERS, *_OF_MOUNTS}
    is_known = name in WEIGHT_FILES | {MARKER} or is_temporary(name) or is_catalogue_name(name)
    return is_known and stat.S_ISREG(state.st_mode)


def _some_of(names: list[str]) -> str:
    """Some of the names, for a sentence. Anybody may have chosen them."""
    shown = ", ".join(ascii(name[:_SHOWN_CHARACTERS]) for name in names[:_SHOWN])
    return f"{shown}, ..." if len(names) > _SHOWN else shown
