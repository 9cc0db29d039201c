# SPDX-License-Identifier: Apache-2.0
"""A device in host memory whose copies run when the test says so, in any order that streams and events allow.

A copy reads its source as late, and writes its target as late, as the test lets it run; one whose source is said to be
stable has read it when it is submitted. So a wait that is missing shows in the bytes.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from tests.transfer.execution import clear, execute
from vllm_overlay.transfer.copy_table import CopyTable


class DeviceError(RuntimeError):
    """Stands for CUDA's sticky errors."""


class FakeEvent:
    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self.has_come = False

    def query(self) -> bool:
        self._device.check()
        return self.has_come

    def come(self) -> None:
        self.has_come = True


class FakeStream:
    """Operations one after the other; each is an event to wait for, or single actions in any order."""

    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self._operations: deque[FakeEvent | list[Callable[[], None]]] = deque()
        self.kernels = 0
        self.engine_copies: list[int] = []
        """Bytes of each copy by the engines."""

    @property
    def can_advance(self) -> bool:
        first = self._operations[0] if self._operations else None
        return first is not None and (first.has_come if isinstance(first, FakeEvent) else True)

    def advance(self, choice: int = 0) -> None:
        """Runs one action of the first operation."""
        first = self._operations[0]
        if isinstance(first, list) and first:
            first.pop(choice % len(first))()
        if not first or isinstance(first, FakeEvent):
            self._operations.popleft()

    def submit(self, *actions: Callable[[], None]) -> None:
        self._device.check()
        self._operations.append(list(actions))

    def record(self) -> FakeEvent:
        event = FakeEvent(self._device)
        self.submit(event.come)
        return event

    def wait_for(self, event: FakeEvent) -> None:
        self._device.check()
        self._operations.append(event)

    def copy(self, table: CopyTable, *, source_is_stable: bool) -> None:
        assert (table.rows == 1).all()
        copies = [partial(execute, table.chosen(table.targets == target)) for target in table.targets]
        if source_is_stable:
            rows = zip(table.sources.tolist(), table.targets.tolist(), table.row_bytes.tolist(), strict=True)
            copies = [partial(write, target, ctypes.string_at(source, size)) for source, target, size in rows]
        self.submit(*copies)
        self.engine_copies += table.row_bytes.tolist()

    def run(self, table: CopyTable, *, only_clear: bool = False) -> None:
        if only_clear:
            self.submit(partial(clear, table))
            return
        self.submit(*[partial(execute, CopyTable(table.fields[:, [place]])) for place in range(len(table))])
        self.kernels += 1


def write(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


class FakeDevice:
    def __init__(self) -> None:
        self.error: DeviceError | None = None
        self.streams = [FakeStream(self)]

    @property
    def compute(self) -> FakeStream:
        return self.streams[0]

    def check(self) -> None:
        """Every call on a lost device raises."""
        if self.error is not None:
            raise self.error

    def lose(self) -> None:
        self.error = DeviceError("an illegal memory access was encountered")

    def compute_stream(self) -> FakeStream:
        return self.compute

    def new_stream(self) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Anything but zeros."""
        return torch.full((num_bytes,), 0xAA, dtype=torch.uint8)

    def run_all(self) -> None:
        """Everything that was submitted."""
        while ready := [stream for stream in self.streams if stream.can_advance]:
            ready[0].advance()
