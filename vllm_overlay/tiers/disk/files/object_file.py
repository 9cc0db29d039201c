# SPDX-License-Identifier: Apache-2.0
"""One object's file: written beside its place, read and verified whole."""

import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from vllm_overlay.common.ownership import why_not_ours
from vllm_overlay.common.reasons import Reason
from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.files.device import Device, make_directory, read_all, write_all
from vllm_overlay.tiers.disk.files.format import (
    HEADER_BYTES,
    FormatError,
    Identity,
    ObjectHeader,
    file_bytes,
    padded_bytes,
)
from vllm_overlay.tiers.disk.files.marker import require_marker
from vllm_overlay.tiers.memory import Bytes, HostBuffer

READ_ATTEMPTS = 3
"""How often a file is opened and read before its object is a miss.

A stale handle or a path that fails over works by the second time. A bad sector fails each time and takes seconds, of
which a load has ``load_timeout_s``.
"""
_T = TypeVar("_T")
_own = threading.local()


_OWN_TROUBLE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say what this process lacks. They say nothing of the file, which may be read again at once."""


def _page() -> memoryview:
    """An aligned header page of this thread's own. What it held before means nothing."""
    if not hasattr(_own, "page"):
        _own.page = memoryview(mmap.mmap(-1, HEADER_BYTES))
    page: memoryview = _own.page
    return page


class BadObject(Exception):
    """The object cannot be loaded. ``reason`` is a metric label.

    ``is_bad`` says whether its file is gone, or was read and is not what it should be. A file that could not be read is
    not bad: nothing is known of it. ``is_unreadable`` says that the next read would probably fail too.
    """

    def __init__(self, reason: Reason, is_bad: bool = True, is_unreadable: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_bad = is_bad
        self.is_unreadable = is_unreadable


def _views(buffer: HostBuffer) -> list[memoryview]:
    return [segment.data for segment in buffer.segments()]


def _with_padding(buffer: HostBuffer, segments: list[memoryview]) -> tuple[list[memoryview], Bytes]:
    """The payload's views ``segments``, the last one grown to whole pages, and the view of the padding alone.

    The padding lies in the last unit when that has room, else in memory of its own.
    """
    padding_bytes = padded_bytes(buffer.num_bytes) - buffer.num_bytes
    last = len(segments[-1])
    row = buffer.array[buffer.units[-1]]
    if last + padding_bytes <= row.size:
        return [*segments[:-1], row[: last + padding_bytes].data], row[last : last + padding_bytes]
    padding: Bytes = np.zeros(padding_bytes, dtype=np.uint8)
    return [*segments, padding.data], padding


def write_object(
    device: Device,
    path: str,
    header: ObjectHeader,
    buffer: HostBuffer,
    direct: bool,
    integrity: Integrity = XXH3,
) -> None:
    """Seal the header, and write the object to ``path``, a new temporary.

    Called by a write thread. Creates directories as needed. With an encryption key the buffer is encrypted in place, so
    it serves once. Raises OSError; removing what was written is the caller's.
    """
    views = _views(buffer)
    segments, padding = _with_padding(buffer, views)
    padding[:] = 0
    page = _page()
    page[:] = header.sealed(integrity.seal(views)).encode(integrity)
    fd = _create(device, path, os.O_DIRECT if direct else 0)
    try:
        write_all(device, fd, [page, *segments])
    finally:
        device.close(fd)


def _create(device: Device, path: str, flags: int) -> int:
    flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return device.open(path, flags)
    except FileNotFoundError:
        _make_object_directory(device, path)
        return device.open(path, flags)


def _make_object_directory(device: Device, path: str) -> None:
    """Make the directory of the file ``<root>/<fingerprint>/<aa>/<name>``. Raises OSError where the root is gone."""
    require_marker(_root_of(path))
    make_directory(device, os.path.dirname(path))


def _root_of(path: str) -> str:
    return path.rsplit("/", 3)[0]


def _open_checked(device: Device, path: str, flags: int) -> tuple[int, int]:
    """The descriptor and size of a regular file. O_NONBLOCK: a pipe in its place must not hold the thread.

    A file that others may have written is a miss, and theirs to remove.
    """
    try:
        fd = device.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    except FileNotFoundError as error:
        raise BadObject(Reason.MISSING) from error
    except OSError as error:
        if not stat.S_ISREG(device.lstat(path).st_mode):
            raise BadObject(Reason.HEADER) from error
        raise
    try:
        found = device.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise BadObject(Reason.HEADER)
        if why_not_ours(found):
            raise BadObject(Reason.OWNER, is_bad=False, is_unreadable=True)
    except BaseException:
        device.close(fd)
        raise
    return fd, found.st_size


def _fill(device: Device, fd: int, segments: list[memoryview]) -> None:
    """Read as many bytes as the file has by its size. Raises OSError when there are fewer: what was not read may be
    right."""
    if not read_all(device, fd, segments):
        raise _too_short()


def _too_short() -> OSError:
    return OSError(errno.EIO, "the file ends before its size says")


def _read_patiently(read: Callable[[], _T], is_wanted: Callable[[], bool] = lambda: True) -> _T:
    """What ``read`` returns, tried again after an OSError while it is wanted. Raises BadObject."""
    for attempt in range(1, 1 + READ_ATTEMPTS):
        try:
            return read()
        except OSError as error:
            if attempt == READ_ATTEMPTS or not is_wanted():
                is_unreadable = error.errno not in _OWN_TROUBLE
                raise BadObject(Reason.IO_ERROR, is_bad=False, is_unreadable=is_unreadable) from error
    raise AssertionError


def read_header(device: Device, path: str, integrity: Integrity = XXH3) -> ObjectHeader:
    """The verified header of a file of the size that the header says. Called by the threads of recovery. Raises
    BadObject."""
    return _read_header(device, path, partial(ObjectHeader.decode, integrity=integrity))


def _read_header(device: Device, path: str, decode: Callable[[bytes], ObjectHeader]) -> ObjectHeader:
    page = _page()
    size = _read_patiently(lambda: _read_page(device, path, page))
    header = _decode(page, decode)
    if size != file_bytes(header.payload_bytes):
        raise BadObject(Reason.SIZE)
    return header


HeaderReader = Callable[[Device, str], ObjectHeader]
"""Reads the header of a file; raises BadObject."""


def header_reader(integrity: Integrity) -> HeaderReader:
    """``read_header`` of that integrity."""
    return lambda device, path: read_header(device, path, integrity)


def read_unverified(device: Device, path: str) -> ObjectHeader:
    """What a header claims, whatever its key. Raises BadObject."""
    return _read_header(device, path, ObjectHeader.decode_unverified)


def _read_page(device: Device, path: str, page: memoryview) -> int:
    """Read the first page of a file. Returns the file's size."""
    fd, size = _open_checked(device, path, 0)
    try:
        if size < HEADER_BYTES:
            raise BadObject(Reason.SIZE)
        _fill(device, fd, [page])
    finally:
        device.close(fd)
    return size


def _decode(page: memoryview, decode: Callable[[bytes], ObjectHeader]) -> ObjectHeader:
    try:
        return decode(bytes(page))
    except FormatError as error:
        raise BadObject(Reason.HEADER) from error


def read_object(
    device: Device,
    path: str,
    identity: Identity,
    buffer: HostBuffer,
    direct: bool,
    integrity: Integrity = XXH3,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Fill ``buffer`` with the object of ``identity``, decrypted, and verify every byte of its file.

    Called by a read thread. Raises BadObject, and the buffer's bytes mean nothing then. ``is_wanted`` is asked before a
    failed read is tried again.
    """
    views = _views(buffer)
    segments, padding = _with_padding(buffer, views)
    page = _page()
    flags = os.O_DIRECT if direct else 0
    num_bytes = file_bytes(identity.payload_bytes)
    _read_patiently(lambda: _read_whole(device, path, flags, num_bytes, [page, *segments]), is_wanted)
    header = _decode(page, partial(ObjectHeader.decode, integrity=integrity))
    if header.identity != identity:
        raise BadObject(Reason.HEADER)
    opening = integrity.open(header.seal.salt)
    for view in views:
        opening.update(view)
    if not opening.verify(header.seal.checksum) or padding.any():
        raise BadObject(Reason.CHECKSUM)


def _read_whole(device: Device, path: str, flags: int, num_bytes: int, segments: list[memoryview]) -> None:
    """Fill the segments with a file of just ``num_bytes``."""
    fd, size = _open_checked(device, path, flags)
    try:
        if size != num_bytes:
            raise BadObject(Reason.SIZE)
        _fill(device, fd, segments)
    finally:
        device.close(fd)
