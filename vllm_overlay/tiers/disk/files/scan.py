# SPDX-License-Identifier: Apache-2.0
"""What lies under a root, without opening any file."""

import os
import re
import time
from collections.abc import Iterator

import msgspec

from vllm_overlay.tiers.disk.files.device import Device, is_temporary, remove_quietly, writer_is_alive
from vllm_overlay.tiers.disk.files.format import counted_bytes
from vllm_overlay.tiers.disk.files.namespace import FINGERPRINT, parse_file_name

ORPHAN_AGE_S = 3600.0
"""Longer than anybody writes a file, and longer than any two hosts' clocks are apart."""
FAN_OUT = re.compile(r"[0-9a-f]{2}")


class FoundFile(msgspec.Struct, frozen=True, gc=False):
    """A file in a namespace's directories. ``num_bytes`` is what it counts against the capacity, ``mtime`` in seconds
    since the epoch."""

    path: str
    name: str
    num_bytes: int
    mtime: float
    inode: int = 0


def namespaces_under(root: str, is_strict: bool = False) -> list[str]:
    """The fingerprints that have a directory; a link to one is not followed."""
    entries = (entry for entry in _entries(root, is_strict) if FINGERPRINT.fullmatch(entry.name))
    return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def fan_out_directories(root: str, fingerprint: str, is_strict: bool = False) -> list[str]:
    """The directories ``<root>/<fingerprint>/<aa>``, in which files of objects lie; links to some are not followed."""
    entries = (entry for entry in _entries(os.path.join(root, fingerprint), is_strict) if FAN_OUT.fullmatch(entry.name))
    return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))


def scan_namespace(root: str, fingerprint: str, is_strict: bool = False) -> Iterator[FoundFile]:
    """Everything but directories in ``<root>/<fingerprint>/<aa>``, as ``scan_directory`` finds it."""
    for directory in fan_out_directories(root, fingerprint, is_strict):
        yield from scan_directory(directory, is_strict)


def scan_objects(root: str, fingerprint: str) -> Iterator[FoundFile]:
    """The same, but only what has an object's name. All else is temporary or a stranger's."""
    return (file for file in scan_namespace(root, fingerprint) if parse_file_name(file.name) is not None)


def scan_directory(path: str, is_strict: bool = False) -> Iterator[FoundFile]:
    """Everything in ``path`` itself but directories.

    What vanishes is left out. So is what cannot be looked at now, unless ``is_strict``: then that raises OSError.
    """
    harmless = _harmless(is_strict)
    for entry in _entries(path, is_strict):
        try:
            if entry.is_dir(follow_symlinks=False):
                continue
            found = entry.stat(follow_symlinks=False)
        except harmless:
            continue
        yield FoundFile(entry.path, entry.name, counted_bytes(found.st_size), found.st_mtime, found.st_ino)


def _entries(path: str, is_strict: bool) -> Iterator[os.DirEntry[str]]:
    harmless = _harmless(is_strict)
    try:
        with os.scandir(path) as entries:
            yield from entries
    except harmless:
        return


def _harmless(is_strict: bool) -> tuple[type[OSError], ...]:
    return (FileNotFoundError, NotADirectoryError) if is_strict else (OSError,)


def is_orphan(file: FoundFile, is_alone: bool = False) -> bool:
    """Whether it is a temporary that nobody will rename any more. ``is_alone`` says that no other process uses the
    root."""
    is_alive = writer_is_alive(file.name)
    if is_alive is None:
        return is_alone or was_written_before(file, time.time() - ORPHAN_AGE_S)
    return not is_alive


def was_written_before(file: FoundFile, moment: float) -> bool:
    """Whether nobody has written the file since, as far as its time says.

    A time so far in the future that no clock explains it says nothing. It must not keep a file for ever.
    """
    return file.mtime < moment or file.mtime > time.time() + ORPHAN_AGE_S


def unlink_if_same(device: Device, file: FoundFile) -> bool:
    """Unlink the file that was found, but no other one that has its name by now. Returns whether it is gone."""
    try:
        found = device.lstat(file.path)
        if (found.st_ino, found.st_mtime) != (file.inode, file.mtime):
            return False
        device.unlink(file.path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def sweep_temporaries(root: str, device: Device) -> None:
    """Remove orphan temporaries of the root and of the namespaces' own directories."""
    for directory in (root, *(os.path.join(root, name) for name in namespaces_under(root))):
        for file in scan_directory(directory):
            if is_temporary(file.name) and is_orphan(file):
                remove_quietly(device, file.path)
