# SPDX-License-Identifier: Apache-2.0
"""The worker's half over a stream whose copies end when the test says so."""

from typing import Any

import pytest

from tests.connector.fake_stream import UNIT, FakeStream, FakeTier
from vllm_overlay.connector.lora.digests import LoadedAdapters
from vllm_overlay.connector.metadata import LoadJob, OffloadWorkerMetadata, StoreJob
from vllm_overlay.connector.worker import OffloadWorker
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tally import Tally
from vllm_overlay.tiers.base import LoadTicket, StoreTicket
from vllm_overlay.transfer.base import Handle, Placement, Span

LOAD_TIMEOUT_S = 1000.0
"""Only a test that moves the clock reaches it."""


def at(block_id: int) -> Placement:
    return Placement(spans=(Span(0, block_id, 0, 64),))


def store_jobs(*tickets: int) -> tuple[StoreJob, ...]:
    """Stores of the blocks of these numbers."""
    planned = [PlannedObject(ObjectId("f0", ticket.to_bytes(4, "big")), (), 0, 64, UNIT) for ticket in tickets]
    return tuple(StoreJob(StoreTicket(ticket, one), at(ticket)) for ticket, one in zip(tickets, planned, strict=True))


def load_jobs(load_id: str, blocks: list[int], zeros: tuple[Span, ...] = ()) -> tuple[LoadJob, ...]:
    tickets = tuple(LoadTicket(n, ObjectId("f0", bytes([n])), UNIT) for n in range(len(blocks)))
    return (LoadJob(load_id, load_id.partition("#")[0], tickets, tuple(map(at, blocks)), zeros),)


class Made:
    """A worker's half, its tier and its stream; the clock is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_units: int = 64, ring_buffers: int = 1 << 30) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.stream = FakeStream(ring_buffers)
        self.num_units = num_units
        self.tally, self.told = Tally(), Tally()
        self.reported: dict[int, bool] = {}
        self.use(FakeTier(num_units))

    def use(self, tier: FakeTier) -> None:
        self.tier = tier
        self.worker = OffloadWorker(
            self.stream, tier, LoadedAdapters(), load_timeout_s=LOAD_TIMEOUT_S, tally=self.tally
        )

    def store(self, *tickets: int) -> None:
        """Each block holds its number."""
        for ticket in tickets:
            self.stream.blocks[ticket] = bytes([ticket % 256]) * UNIT
        self.worker.store(store_jobs(*tickets))
        for ticket in tickets:
            self.stream.blocks[ticket] = b"reused!!"

    def load(self, load_id: str, blocks: list[int], zeros: tuple[Span, ...] = ()) -> None:
        self.worker.start_loads(self.begin(load_id, blocks, zeros), ())

    def begin(self, load_id: str, blocks: list[int], zeros: tuple[Span, ...] = ()) -> tuple[LoadJob, ...]:
        """What happens of a load before the pass."""
        jobs = load_jobs(load_id, blocks, zeros)
        self.worker.begin_loads(jobs)
        return jobs

    def arrive(self, position: int = 0, content: bytes = b"content.", **failure: Any) -> None:
        """An object of the load p#1 is in host memory, or will never be, and a step later that is known."""
        self.tier.arrive("p#1", position, content, **failure)
        self.worker.advance()

    def end(self, *handles: Handle, error: BaseException | None = None) -> None:
        """These copies have ended, or all."""
        for handle in handles or self.stream.in_flight:
            self.stream.end(handle, error)
        self.worker.advance()

    def pass_time(self) -> None:
        """Longer than a load may take."""
        self.now += LOAD_TIMEOUT_S + 0.1
        self.worker.advance()

    def report(self) -> OffloadWorkerMetadata:
        metadata = self.worker.take_metadata() or OffloadWorkerMetadata()
        assert not set(metadata.reported) & set(self.reported), "a ticket was reported twice"
        self.reported |= {ticket: ticket in metadata.failed_stores for ticket in metadata.reported}
        self.told.add(metadata.tally)
        return metadata

    def reports(self) -> dict[int, bool]:
        """Tickets that were reported so far, and whether they failed."""
        self.report()
        return self.reported

    def counted(self, name: str) -> float:
        """Told with a report, or to be told with the next."""
        return self.told.counters.get(name, 0) + self.tally.counters.get(name, 0)

    @property
    def all_is_free(self) -> bool:
        return len(self.tier.free) == self.num_units
