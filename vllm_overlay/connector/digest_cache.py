# SPDX-License-Identifier: Apache-2.0
"""The digests of weight files that were read before, in a file that is believed only if nobody else can write it.

It lies in a directory of this user alone, as a root of the disk tier is. Whoever calls this holds the lock beside it,
so that one process at a time reads and writes.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_overlay import versions
from vllm_overlay.common.ownership import why_not_ours
from vllm_overlay.common.whole_file import replace_file

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
MAX_ENTRIES = 2048
"""This many entries fit in ``MAX_BYTES``, even of the longest ones."""
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_Hex = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class FileIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What shows that a file has changed. No program can set ``ctime_ns`` back. ``path`` is the BLAKE3 of the path,
    because a path has any length and need not be UTF-8."""

    path: _Hex
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: FileIdentity
    digest: _Hex


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    entries: Annotated[list[_Entry], Meta(max_length=MAX_ENTRIES)]

    def __post_init__(self) -> None:
        if self.version != versions.WEIGHT_DIGESTS:
            raise ValueError(f"it has version {self.version}")


def read_digests(path: Path) -> dict[FileIdentity, str]:
    """The digests, in 64 hex digits. Never raises. Logs one line when the file is not believed."""
    try:
        with open(os.open(path, _OPEN), "rb") as file:
            why = why_not_ours(os.fstat(file.fileno()))
            raw = file.read(MAX_BYTES)
        if not why:
            content = msgspec.json.decode(raw, type=_Content)
            return {entry.file: entry.digest for entry in content.entries}
    except FileNotFoundError:
        return {}
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except (msgspec.DecodeError, UnicodeDecodeError):  # no words of it: they may be hostile
        why = "is damaged or of another version"
    logger.warning(
        "%s %s: it is not used, and weights are read again. If this comes again, remove it, and give its directory to "
        "this user alone (mode 0700)",
        path,
        why,
    )
    return {}


def write_digests(path: Path, digests: Mapping[FileIdentity, str]) -> None:
    """Keeps the last ``MAX_ENTRIES`` of these. Never raises: without them the next start reads the weights."""
    entries = [_Entry(file, digest) for file, digest in digests.items()]
    content = _Content(versions.WEIGHT_DIGESTS, entries[-MAX_ENTRIES:])
    try:
        replace_file(path, msgspec.json.encode(content))
    except OSError as error:
        logger.warning("Cannot keep the weights' digests in %s: %s", path, error)
