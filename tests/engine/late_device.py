# SPDX-License-Identifier: Apache-2.0
"""The transfer for GPUs in a real engine on a CPU: its copies run when the engine polls, late and in random order.

What is submitted to the compute stream has run before the engine computes on, as on a GPU. What is submitted to the
other streams runs a little at each poll. So a load that the engine does not wait for shows in what it answers.
"""

import random
from collections.abc import Callable, Mapping, Sequence

from tests.transfer.fake_device import FakeDevice, FakeEvent, FakeStream
from vllm_overlay.connector import factory
from vllm_overlay.connector.connector import HybridOffloadConnector
from vllm_overlay.tiers.memory import Bytes
from vllm_overlay.transfer.base import KVTransfer
from vllm_overlay.transfer.cuda import CudaTransfer
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.self_check import check_round_trips

ACTIONS_A_POLL = 40


class _Now(FakeStream):
    """The engine's own stream: on a CPU it has always run what was submitted."""

    def submit(self, *actions: Callable[[], None]) -> None:
        for action in actions:
            action()


class _LateEvent(FakeEvent):
    def query(self) -> bool:
        assert isinstance(self._device, LateDevice)
        self._device.advance()
        return super().query()


class _Late(FakeStream):
    def record(self) -> FakeEvent:
        event = _LateEvent(self._device)
        self.submit(event.come)
        return event


class LateDevice(FakeDevice):
    def __init__(self) -> None:
        super().__init__()
        self.streams = [_Now(self)]
        self._luck = random.Random(1)

    def new_stream(self) -> FakeStream:
        self.streams.append(_Late(self))
        return self.streams[-1]

    def advance(self) -> None:
        """A few actions of random streams, in random order."""
        for _ in range(ACTIONS_A_POLL):
            ready = [stream for stream in self.streams if stream.can_advance]
            if not ready:
                return
            self._luck.choice(ready).advance(self._luck.randrange(1 << 16))


def build_late_transfer(
    groups: Mapping[int, GroupTensors], host_memory: Sequence[Bytes], device_buffer_bytes: int
) -> KVTransfer:
    transfer = CudaTransfer(groups, LateDevice(), ring_bytes=device_buffer_bytes)
    check_round_trips(transfer, groups, host_memory[0])
    return transfer


class LateDeviceConnector(HybridOffloadConnector):
    """``kv_connector`` of a child that is to copy so."""


factory.build_transfer = build_late_transfer
