# SPDX-License-Identifier: Apache-2.0
"""Devices that fail, wait, count, move little at a time, or let others act meanwhile."""

import os
import threading
from collections.abc import Callable

from tests.waiting import PATIENCE_S
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.writer import parse_name


class RuledDevice(Device):
    """``before`` is told of each call on a file, and of the file's path, before it is made: it may raise, wait, count,
    or do what another process might do just then."""

    def __init__(self, before: Callable[[str, str], object]) -> None:
        self.before = before
        self._paths: dict[int, str] = {}

    def open(self, path: str, flags: int) -> int:
        self.before("open", path)
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        self.before("close", self._paths.pop(fd, ""))
        super().close(fd)

    def preadv(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self.before("preadv", self._paths.get(fd, ""))
        return super().preadv(fd, segments, offset)

    def pwritev(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self.before("pwritev", self._paths.get(fd, ""))
        return super().pwritev(fd, segments, offset)

    def lstat(self, path: str) -> os.stat_result:
        self.before("lstat", path)
        return super().lstat(path)

    def unlink(self, path: str) -> None:
        self.before("unlink", path)
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        self.before("mkdir", path)
        super().mkdir(path)


class FailingDevice(RuledDevice):
    """``faults`` names the calls that raise for every file, and the error that they raise; ``fail`` is for one file."""

    def __init__(self, **faults: int) -> None:
        super().__init__(self._fault)
        self.faults = dict(faults)
        self.num_faults = self._left = 0
        """Of the file that ``fail`` has named."""

    def fail(self, path: object, error: int, call: str = "preadv", times: int = 1 << 30) -> None:
        self._one = call, str(path)
        self._error, self._left, self.num_faults = error, times, 0

    def _fault(self, call: str, path: str) -> None:
        if self._left and (call, path) == self._one:
            self._left -= 1
            self.num_faults += 1
            raise OSError(self._error, os.strerror(self._error))
        if call in self.faults:
            raise OSError(self.faults[call], os.strerror(self.faults[call]))


class SmallDevice(Device):
    """A file system of ``total`` bytes, of which all are free but what the test says."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total

    def total_bytes(self, path: str) -> int:
        return self.total

    def free_bytes(self, path: str) -> int:
        return self.free


class ShortDevice(Device):
    """Moves at most a page a call, as a kernel may."""

    def preadv(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        return super().preadv(fd, [segments[0][:4096]], offset)

    def pwritev(self, fd: int, segments: list[memoryview], offset: int) -> int:  # type: ignore[override]
        return super().pwritev(fd, [segments[0][:4096]], offset)


def is_object(path: str) -> bool:
    return parse_name(os.path.basename(path)) is not None


class GatedDevice(RuledDevice):
    """Reads or writes of objects wait until the test opens the gate."""

    def __init__(self, call: str) -> None:
        super().__init__(self._pass)
        self._call = call
        self.gate = threading.Event()
        self._arrivals = threading.Semaphore(0)

    def _pass(self, call: str, path: str) -> None:
        if call == self._call and is_object(path):
            self._arrivals.release()
            assert self.gate.wait(PATIENCE_S)

    def await_call(self) -> None:
        """Until one more of them waits."""
        assert self._arrivals.acquire(timeout=PATIENCE_S), f"no {self._call} of an object within {PATIENCE_S:.0f} s"


class Meanwhile(RuledDevice):
    """Once a file was read, ``act`` runs before the next ``call`` on it: as another process might act just then."""

    def __init__(self, path: object, call: str, act: Callable[[], object]) -> None:
        super().__init__(self._meet)
        self._path, self._call, self._act = str(path), call, act
        self._was_read = False
        self.has_acted = threading.Event()

    def _meet(self, call: str, path: str) -> None:
        if path != self._path:
            return
        self._was_read |= call == "preadv"
        if call == self._call and self._was_read and not self.has_acted.is_set():
            self.has_acted.set()
            self._act()
