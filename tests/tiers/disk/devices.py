# SPDX-License-Identifier: Apache-2.0
"""Devices that fail, move little at a time, or wait."""

import os
import threading
from collections.abc import Callable

from tests.waiting import PATIENCE_S
from vllm_overlay.tiers.disk.files.device import Device


class FailingDevice(Device):
    """A device on which ``faults`` names the calls that raise, and the error they raise."""

    def __init__(self, **faults: int) -> None:
        self.faults = dict(faults)

    def _fail(self, call: str) -> None:
        if call in self.faults:
            raise OSError(self.faults[call], os.strerror(self.faults[call]))

    def preadv(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self._fail("preadv")
        return super().preadv(fd, segments, offset)

    def pwritev(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self._fail("pwritev")
        return super().pwritev(fd, segments, offset)

    def rename(self, source: str, target: str) -> None:
        self._fail("rename")
        super().rename(source, target)

    def open(self, path: str, flags: int) -> int:
        self._fail("open")
        return super().open(path, flags)

    def unlink(self, path: str) -> None:
        self._fail("unlink")
        super().unlink(path)


class ShortDevice(Device):
    """Moves at most a page a call, as a kernel may."""

    def preadv(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        return super().preadv(fd, [segments[0][:4096]], offset)

    def pwritev(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        return super().pwritev(fd, [segments[0][:4096]], offset)


class GatedDevice(Device):
    """Reads or writes wait until the test opens the gate."""

    def __init__(self, call):
        self.call = call
        self.gate = threading.Event()
        self.waiting = threading.Semaphore(0)

    def _pass(self, call, segments):
        if call == self.call and len(segments) > 1:  # an object's, not a probe's
            self.waiting.release()
            assert self.gate.wait(PATIENCE_S)

    def preadv(self, fd, segments, offset):
        self._pass("preadv", segments)
        return super().preadv(fd, segments, offset)

    def pwritev(self, fd, segments, offset):
        self._pass("pwritev", segments)
        return super().pwritev(fd, segments, offset)


class UnreadableFile(Device):
    """Once ``fail`` was called, ``call`` (open or preadv) raises ``error`` for one file, so often."""

    def __init__(self) -> None:
        self.num_faults = self._left = 0
        self._path = ""
        self._fds: set[int] = set()

    def fail(self, path: object, error: int, call: str = "preadv", times: int = 1 << 30) -> None:
        self._path, self._error, self._call = str(path), error, call
        self._left, self.num_faults = times, 0

    def _fault(self, call: str) -> None:
        if self._left and call == self._call:
            self._left -= 1
            self.num_faults += 1
            raise OSError(self._error, os.strerror(self._error))

    def open(self, path: str, flags: int) -> int:
        if path == self._path:
            self._fault("open")
        fd = super().open(path, flags)
        (self._fds.add if path == self._path else self._fds.discard)(fd)
        return fd

    def preadv(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        if fd in self._fds:
            self._fault("preadv")
        return super().preadv(fd, segments, offset)


class Meanwhile(Device):
    """Once a file was read, ``act`` runs before the reader does more with it: as another process might act just then.

    ``call`` is "close", for before the reader goes on at all, or "unlink", for before it asks for the file again or
    unlinks it.
    """

    def __init__(self, path: object, call: str, act: Callable[[], object]) -> None:
        self._path, self._call, self._act = str(path), call, act
        self._fds: set[int] = set()
        self._was_read = False
        self.has_acted = threading.Event()

    def _before(self, call: str) -> None:
        if call == self._call and self._was_read and not self.has_acted.is_set():
            self._act()
            self.has_acted.set()

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        (self._fds.add if path == self._path else self._fds.discard)(fd)
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        if fd in self._fds:
            self._was_read = True
            self._before("close")

    def lstat(self, path: str) -> os.stat_result:
        if path == self._path:
            self._before("unlink")
        return super().lstat(path)

    def unlink(self, path: str) -> None:
        if path == self._path:
            self._before("unlink")
        super().unlink(path)
