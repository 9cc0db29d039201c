# SPDX-License-Identifier: Apache-2.0
"""One object's file: written once under a name of its own, read and verified whole."""

import contextlib
import errno
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np

from vllm_overlay.common.reasons import Reason
from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity, Seal
from vllm_overlay.tiers.disk.files.device import Device, read_up_to, remove_quietly, write_all
from vllm_overlay.tiers.disk.files.format import HEADER_BYTES, FormatError, Identity, ObjectHeader, file_bytes
from vllm_overlay.tiers.memory import PAGE_BYTES, Bytes, HostBuffer

READ_ATTEMPTS = 3
"""How often a file is opened and read before its object is a miss.

A stale handle or a path that fails over works by the second time. A bad sector fails each time and takes seconds, of
which a load has ``load_timeout_s``.
"""
_CREATE_ATTEMPTS = 4
_T = TypeVar("_T")
_own = threading.local()
OWN_TROUBLE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say what this process lacks. They say nothing of the file, which may be read again at once."""


def _pages() -> tuple[memoryview, memoryview]:
    """Two aligned pages of this thread's own, for a header and for what lies behind a file's end. What they held before
    means nothing."""
    if not hasattr(_own, "pages"):
        both = memoryview(mmap.mmap(-1, HEADER_BYTES + PAGE_BYTES))
        _own.pages = both[:HEADER_BYTES], both[HEADER_BYTES:]
    pages: tuple[memoryview, memoryview] = _own.pages
    return pages


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
    padding_bytes = file_bytes(buffer.num_bytes) - HEADER_BYTES - buffer.num_bytes
    last = len(segments[-1])
    row = buffer.array[buffer.units[-1]]
    if last + padding_bytes <= row.size:
        return [*segments[:-1], row[: last + padding_bytes].data], row[last : last + padding_bytes]
    padding: Bytes = np.zeros(padding_bytes, dtype=np.uint8)
    return [*segments, padding.data], padding


def seal(buffer: HostBuffer, integrity: Integrity = XXH3) -> Seal:
    """Of an object's bytes. With an encryption key the buffer is encrypted in place, so it serves once."""
    return integrity.seal(_views(buffer))


def write_object(
    device: Device, path: str, header: ObjectHeader, buffer: HostBuffer, direct: bool, integrity: Integrity = XXH3
) -> None:
    """Write the object of a sealed header to ``path``, where nothing was ever written.

    Called by a write thread. Raises OSError, and no file is left then, as far as one can be removed.
    """
    segments, padding = _with_padding(buffer, _views(buffer))
    padding[:] = 0
    page, _ = _pages()
    page[:] = header.encode(integrity)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    fd = _create(device, path, flags)
    try:
        try:
            write_all(device, fd, [page, *segments])
        finally:
            device.close(fd)
    except BaseException:
        remove_quietly(device, path)
        raise


def _create(device: Device, path: str, flags: int) -> int:
    """The descriptor. Raises OSError. The writer's directory is there for as long as the writer lives; the one below
    goes whenever somebody has unlinked its last file."""
    for _ in range(_CREATE_ATTEMPTS):
        try:
            return device.open(path, flags)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                device.mkdir(os.path.dirname(path))
    return device.open(path, flags)


def _read_patiently(read: Callable[[], _T], is_wanted: Callable[[], bool] = lambda: True) -> _T:
    """What ``read`` returns, tried again after an OSError while it is wanted. Raises BadObject."""
    for attempt in range(1, 1 + READ_ATTEMPTS):
        try:
            return read()
        except FileNotFoundError as error:
            raise BadObject(Reason.MISSING) from error
        except OSError as error:
            if attempt == READ_ATTEMPTS or not is_wanted():
                is_unreadable = error.errno not in OWN_TROUBLE
                raise BadObject(Reason.IO_ERROR, is_bad=False, is_unreadable=is_unreadable) from error
    raise AssertionError


@contextlib.contextmanager
def _opened(device: Device, path: str, flags: int = 0) -> Iterator[int]:
    """To be read. Raises OSError, and BadObject for what is no regular file. O_NONBLOCK: a pipe in its place must not
    hold the thread."""
    try:
        fd = device.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
        try:
            yield fd
        finally:
            device.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        if not stat.S_ISREG(device.lstat(path).st_mode):
            raise BadObject(Reason.HEADER) from error
        raise


def read_header(device: Device, path: str, decode: Callable[[bytes], ObjectHeader]) -> tuple[ObjectHeader, float]:
    """The header of a file of the size that the header says, and the time at which the file was written, in seconds
    since the epoch. Called by the threads of recovery. Raises BadObject."""
    page, _ = _pages()

    def read() -> os.stat_result:
        with _opened(device, path) as fd:
            if read_up_to(device, fd, [page], HEADER_BYTES) < HEADER_BYTES:
                raise BadObject(Reason.SIZE)
        return device.lstat(path)

    found = _read_patiently(read)
    header = _decode(page, decode)
    if found.st_size != file_bytes(header.payload_bytes):
        raise BadObject(Reason.SIZE)
    return header, found.st_mtime


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
    take: Callable[[int, memoryview], None] = lambda begin, part: None,
) -> None:
    """Fill ``buffer`` with the object of ``identity``, decrypted, and verify every byte of its file.

    Called by a read thread. Raises BadObject, and the buffer's bytes mean nothing then. ``is_wanted`` is asked before a
    failed read is tried again. ``take`` gets each part of the payload, from byte ``begin`` on, while the processor has
    it at hand: before the object is verified as a whole, and again when it is read again.
    """
    views = _views(buffer)
    segments, padding = _with_padding(buffer, views)
    page, behind = _pages()
    num_bytes = file_bytes(identity.payload_bytes)

    def payload() -> Iterator[memoryview]:
        begin = 0
        for view in views:
            yield view
            take(begin, view)
            begin += len(view)

    def read() -> None:
        with _opened(device, path, os.O_DIRECT if direct else 0) as fd:
            if read_up_to(device, fd, [page, *segments, behind], num_bytes) != num_bytes:
                if device.lstat(path).st_size == num_bytes:  # not read to its end: what is left may be right
                    raise OSError(errno.EIO, "the file ends before its size says")
                raise BadObject(Reason.SIZE)
        header = _decode(page, partial(ObjectHeader.decode, integrity=integrity))
        if header.identity != identity:
            raise BadObject(Reason.HEADER)
        if not integrity.unseal(header.seal, payload()) or padding.any():
            raise BadObject(Reason.CHECKSUM)

    _read_patiently(read, is_wanted)
