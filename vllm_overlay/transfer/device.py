# SPDX-License-Identifier: Apache-2.0
"""What a transfer asks of a device: streams, events, copies. ``cuda_device.py`` has CUDA's. The tests have a fake.

Everything is submitted, and nothing waits. Each call may raise when the device fails. The operations of a stream run
one after the other. The copies within one operation run in any order. Those of two streams run at any time, unless one
waits for the other's event.
"""

from abc import ABC, abstractmethod

import torch

from vllm_overlay.transfer.copy_table import CopyTable


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def has_passed(self) -> bool:
        """Whether all that was submitted before it has ended. Never waits."""


class Stream(ABC):
    """An order of operations."""

    @abstractmethod
    def record(self) -> Event:
        """The point after what has been submitted."""

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """What is submitted from now on runs after the event has passed."""

    @abstractmethod
    def copy(self, table: CopyTable, *, source_is_stable: bool) -> None:
        """Copies of a single row each, by the copy engines.

        ``source_is_stable`` allows them to read at any time from now on, ahead of what the stream waits for.
        """

    @abstractmethod
    def run(self, table: CopyTable) -> None:
        """Copies by one kernel. It reads and writes device memory and pinned host memory."""

    @abstractmethod
    def clear(self, table: CopyTable) -> None:
        """Writes zeros to the targets, by one kernel."""


class Device(ABC):
    @abstractmethod
    def compute_stream(self) -> Stream:
        """The stream that the engine computes in now. The next step may have another one."""

    @abstractmethod
    def new_stream(self) -> Stream: ...

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Bytes in device memory, at an address that is a multiple of 256."""
