# SPDX-License-Identifier: Apache-2.0
"""Devices that fail, move little at a time, or wait."""

import os
import threading

from vllm_overlay.tiers.disk.device import Device


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
            assert self.gate.wait(20)

    def preadv(self, fd, segments, offset):
        self._pass("preadv", segments)
        return super().preadv(fd, segments, offset)

    def pwritev(self, fd, segments, offset):
        self._pass("pwritev", segments)
        return super().pwritev(fd, segments, offset)
