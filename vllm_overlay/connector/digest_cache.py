# SPDX-License-Identifier: Apache-2.0
"""The digests of weight files that were read before, in a file that is believed only if nobody else wrote it.

It and its directory must be this user's, and closed to others.
"""

import contextlib
import errno
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_overlay import versions
from vllm_overlay.common.ownership import why_not_ours

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
MAX_ENTRIES = 2048
"""This many entries fit in ``MAX_BYTES``, even of the longest ones."""
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_Hex = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class FileIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What shows that a file has changed. No program can set ``ctime_ns`` back.

    ``path`` is the BLAKE3 of the path, because a path has any length and need not be UTF-8.
    """

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


class _NotBelievedError(Exception):
    """Others may have written the file; the message says why."""


class DigestCache:
    """One cache file. Its user holds the lock beside it, so that one process at a time reads and writes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[FileIdentity, str]:
        """The digests, in 64 hex digits. Never raises. Logs one line when the file is not believed."""
        try:
            content = msgspec.json.decode(self._read_bytes(), type=_Content)
        except FileNotFoundError:
            return {}
        except _NotBelievedError as reason:
            return self._unused(str(reason))
        except OSError as error:
            return self._unused(f"cannot be read ({error.strerror})")
        except (msgspec.DecodeError, UnicodeDecodeError):  # no words of it: they may be hostile
            logger.info("%s is damaged or of another version: weights are read again", self._path)
            return {}
        return {entry.file: entry.digest for entry in content.entries}

    def write(self, digests: Mapping[FileIdentity, str]) -> None:
        """Keeps the last ``MAX_ENTRIES`` of these. Never raises: without the file the next start reads the weights
        again.

        Writes nothing where the next ``read`` would not believe it.
        """
        entries = [_Entry(file, digest) for file, digest in digests.items()]
        content = _Content(versions.WEIGHT_DIGESTS, entries[-MAX_ENTRIES:])
        try:
            if not why_not_ours(os.stat(self._path.parent)):
                _replace_file(self._path, msgspec.json.encode(content))
        except OSError as error:
            logger.warning("Cannot keep the weights' digests in %s: %s", self._path, error)

    def _read_bytes(self) -> bytes:
        """Raises OSError or _NotBelievedError."""
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if why := why_not_ours(os.fstat(directory)):
                raise _NotBelievedError(f"lies in a directory that {why}")
            fd = os.open(self._path.name, _OPEN, dir_fd=directory)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise _NotBelievedError("is a link") from error
            raise
        finally:
            os.close(directory)
        try:
            self._check_file(os.fstat(fd))
            with open(fd, "rb", closefd=False) as file:
                raw = file.read(MAX_BYTES + 1)
        finally:
            os.close(fd)
        if len(raw) > MAX_BYTES:
            raise _NotBelievedError(f"has more than {MAX_BYTES} bytes")
        return raw

    def _check_file(self, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise _NotBelievedError("is no regular file")
        if why := why_not_ours(found):
            raise _NotBelievedError(why)

    def _unused(self, why: str) -> dict[FileIdentity, str]:
        """Logs that the file is not used, and what to change."""
        logger.warning(
            "%s %s: it is not used, and weights are read again. Remove it, and give its directory to this user alone "
            "(mode 0700)",
            self._path,
            why,
        )
        return {}


def _replace_file(path: Path, content: bytes) -> None:
    """Gives ``path`` the content, with mode 0600: a reader sees the old bytes or the new ones, never a part of them.

    Its directory must exist. Raises OSError; then nothing has changed. Nothing is synced: after a crash the file may be
    the old one.
    """
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise
