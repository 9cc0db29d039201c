# SPDX-License-Identifier: Apache-2.0
"""A transfer as of a GPU: copies are submitted to a stream, and end when the test says so, in any order.

A gather's bytes are those that the blocks hold when it is submitted: a real one reads them on the compute stream. A
scatter's arrive only when it ends: until then the buffers must not change, and the blocks are not the request's.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_overlay.tiers.base import FetchResult, LoadTicket, StoreResult, StoreTicket, TierWorker
from vllm_overlay.tiers.memory import HostBuffer, HostPool
from vllm_overlay.transfer.base import FinishedCopy, Handle, KVTransfer, Placement, Span

UNIT = 8


@dataclass
class Copy:
    """One submitted copy. ``end`` does what is left of it to do."""

    handle: Handle
    placements: Sequence[Placement]
    buffers: Sequence[HostBuffer]
    zeros: Sequence[Span]
    end: Callable[[], None]


class FakeStream(KVTransfer):
    """``blocks`` maps a block id to its bytes. At most ``ring_buffers`` buffers are on their way to the host."""

    def __init__(self, ring_buffers: int = 1 << 30) -> None:
        self.blocks: dict[int, bytes] = {}
        self.submitted: dict[Handle, Copy] = {}
        self.cleared: list[Span] = []
        self.is_broken = False
        self._ring_buffers = ring_buffers
        self._handles = itertools.count(1)
        self._finished: list[FinishedCopy] = []

    def gather(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer]) -> Handle | None:
        on_their_way = sum(len(copy.buffers) for copy in self.submitted.values() if not copy.zeros)
        if on_their_way + len(buffers) > self._ring_buffers:
            return None
        ring = [self.blocks[placement.spans[0].block_id] for placement in placements]

        def end() -> None:
            for content, buffer in zip(ring, buffers, strict=True):
                buffer.segments()[0][:] = np.frombuffer(content, np.uint8)

        return self._submit(placements, buffers, (), end)

    def scatter(
        self, placements: Sequence[Placement], buffers: Sequence[HostBuffer], zeros: Sequence[Span] = ()
    ) -> Handle:
        def end() -> None:
            for placement, buffer in zip(placements, buffers, strict=True):
                self.blocks[placement.spans[0].block_id] = buffer.segments()[0].tobytes()
            self.cleared.extend(zeros)

        return self._submit(placements, buffers, zeros, end)

    def _submit(
        self,
        placements: Sequence[Placement],
        buffers: Sequence[HostBuffer],
        zeros: Sequence[Span],
        end: Callable[[], None],
    ) -> Handle:
        handle = Handle(next(self._handles))
        self.submitted[handle] = Copy(handle, placements, buffers, zeros, end)
        if self.is_broken:
            self.end(handle, RuntimeError("device-side assert"))
        return handle

    def poll(self) -> list[FinishedCopy]:
        finished, self._finished = self._finished, []
        return finished

    def close(self, timeout_s: float) -> bool:
        """The stream is waited for: every copy that is not stuck ends."""
        for handle in list(self.submitted):
            self.end(handle)
        return True

    # What a test does.

    @property
    def in_flight(self) -> list[Handle]:
        return list(self.submitted)

    def end(self, handle: Handle, error: BaseException | None = None) -> None:
        """The copy's event has come."""
        copy = self.submitted.pop(handle)
        if error is None:
            copy.end()
        self._finished.append(FinishedCopy(handle, error))


class FakeTier(TierWorker):
    """A byte half with a few rows of memory; it remembers what has been done to its buffers.

    ``tests`` decide when fetches come: ``arrive``. ``free`` are the rows that nobody uses.
    """

    def __init__(self, num_units: int = 64) -> None:
        self._pool = HostPool(num_units, UNIT)
        self.free = list(range(num_units))
        self.stored: dict[int, bytes] = {}
        self.cancelled_stores: list[int] = []
        self.cancelled_loads: list[str] = []
        self.ended: list[tuple[str, int]] = []
        self.late: list[str] = []
        self.pause_s = 0.0
        self._loads: dict[str, dict[int, HostBuffer]] = {}
        self._tickets: dict[str, list[LoadTicket]] = {}
        self._results: list[StoreResult] = []
        self._fetched: list[FetchResult] = []

    def _take(self) -> HostBuffer:
        return self._pool.buffer((self.free.pop(0),), UNIT)

    def begin_store(self, ticket: StoreTicket) -> HostBuffer | None:
        return self._take() if self.free else None

    def submit_store(self, ticket: StoreTicket, buffer: HostBuffer) -> None:
        self.stored[ticket.ticket] = buffer.segments()[0].tobytes()
        self.free += buffer.units
        self._results.append(StoreResult(ticket.ticket, UNIT, 0.0))

    def cancel_store(self, ticket: StoreTicket, buffer: HostBuffer) -> None:
        self.cancelled_stores.append(ticket.ticket)
        self.free += buffer.units

    def begin_load(self, load_id: str, tickets: Sequence[LoadTicket]) -> None:
        self._loads[load_id], self._tickets[load_id] = {}, list(tickets)

    def is_loading(self, load_id: str) -> bool:
        """Whether it was asked for and is wanted still."""
        return load_id in self._loads

    def arrive(self, load_id: str, position: int, content: bytes, **failure: Any) -> None:
        """The object is in host memory now, or is not to be had for ``reason``."""
        ticket = self._tickets[load_id][position]
        buffer = None
        if not failure:
            buffer = self._loads[load_id][position] = self._take()
            buffer.segments()[0][:] = np.frombuffer(content, np.uint8)
        self._fetched.append(FetchResult(load_id, position, ticket.object_id, UNIT, 0.0, buffer, **failure))

    def end_fetch(self, load_id: str, position: int) -> None:
        self.free += self._loads[load_id].pop(position).units
        self.ended.append((load_id, position))

    def cancel_load(self, load_id: str) -> None:
        for buffer in self._loads.pop(load_id).values():
            self.free += buffer.units
        self.cancelled_loads.append(load_id)

    def load_was_late(self, load_id: str) -> None:
        self.late.append(load_id)

    def load_pause_s(self) -> float:
        return self.pause_s

    def poll(self) -> tuple[list[StoreResult], list[FetchResult]]:
        results, self._results = self._results, []
        fetched, self._fetched = self._fetched, []
        return results, fetched

    def close(self, timeout_s: float) -> int:
        return 0


class FlakyTier(FakeTier):
    """Raises now and then, before it has done anything; ``probability`` says how often."""

    def __init__(self, num_units: int, luck: random.Random, probability: float) -> None:
        super().__init__(num_units)
        for name in ("begin_store", "submit_store", "cancel_store", "begin_load", "end_fetch", "cancel_load", "poll"):
            setattr(self, name, self._flaky(getattr(self, name), luck, probability))

    @staticmethod
    def _flaky(method: Callable[..., Any], luck: random.Random, probability: float) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            if luck.random() < probability:
                raise RuntimeError("injected")
            return method(*arguments)

        return called
