# SPDX-License-Identifier: Apache-2.0
"""The file that shows that a directory is a root of the disk tier, in the words of the version that made it."""

import contextlib
import errno
import os
import stat
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vllm_overlay import versions
from vllm_overlay.common.ownership import why_not_ours
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files.device import Device, remove_quietly, write_all
from vllm_overlay.tiers.disk.files.mounts import ROLLBACK, WRITE_AHEAD

MARKER = "vllm-overlay-root.json"
_MAX_BYTES = 1024


class _Words(msgspec.Struct, frozen=True):
    """What every version's marker says. Later ones may say more."""

    format: Literal["vllm-overlay disk tier root"]
    version: Annotated[int, Meta(ge=1)]
    written_by: Annotated[str, Meta(pattern=r"\A[0-9A-Za-z.+-]{1,64}\Z")]
    journal: str = ""


class NotARootError(ConfigError):
    """The directory is no root of the disk tier, or not one of this version. ``why`` continues a sentence that begins
    with the directory's name."""

    def __init__(self, root: str, why: str) -> None:
        super().__init__(f"{root} {why}")
        self.why = why


def encode_marker(journal: str) -> bytes:
    """The marker that this version writes."""
    words = _Words("vllm-overlay disk tier root", versions.DISK_ROOT, versions.PACKAGE, journal)
    return msgspec.json.format(msgspec.json.encode(words)) + b"\n"


def marked_journal(root: str) -> str:
    """The journal that ``root`` was made with, by its marker; empty when it has none.

    A marker that others may have written counts as none, and so does a damaged one. Raises NotARootError for a later
    format than this version's. Raises OSError when nobody can say.
    """
    try:
        words = msgspec.json.decode(_read(root), type=_Words)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    if words.version > versions.DISK_ROOT:
        raise NotARootError(
            root,
            f"was made by vllm-overlay {words.written_by} in format {words.version}, and {versions.PACKAGE} knows only "
            f"format {versions.DISK_ROOT}: use that version or a later one, or choose an empty directory",
        )
    return words.journal if words.journal in (WRITE_AHEAD, ROLLBACK) else ""


def _read(root: str) -> bytes:
    """The marker's bytes. Empty when there is none that can be believed."""
    try:
        fd = os.open(os.path.join(root, MARKER), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):  # not there, a link, a socket
            return b""
        raise
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        return file.read(_MAX_BYTES) if stat.S_ISREG(found.st_mode) and not why_not_ours(found) else b""


def write_marker(device: Device, root: str, journal: str) -> None:
    """Called when ``root`` was found to be one, or empty, and has no valid marker. Raises OSError.

    Two servers that start at once write the same bytes, and half a marker is none. It is synced, because all else may
    be lost in a power cut.
    """
    path = os.path.join(root, MARKER)
    remove_quietly(device, path)
    fd = device.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        write_all(device, fd, [memoryview(encode_marker(journal))])
        _sync(fd)
    finally:
        device.close(fd)
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(fd)
    finally:
        os.close(fd)


def _sync(fd: int) -> None:
    """Syncs. Where the file system cannot, a power cut may cost the marker."""
    with contextlib.suppress(OSError):
        os.fsync(fd)
