# SPDX-License-Identifier: Apache-2.0
"""Somebody else's tier, known to the connector by its module path alone: a store of whole objects by name.

Its manager knows names and nothing of what depends on what; its workers keep bytes in a dictionary. What its manager
tells its workers in a ticket, and its workers its manager at start, are types of its own.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from vllm_overlay.config import TierSettings, parse_bytes
from vllm_overlay.planner.batched_hits import BatchedHits
from vllm_overlay.planner.coverage import HitSource
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import (
    FetchResult,
    LoadTicket,
    StoreResult,
    StoreTicket,
    TierManager,
    TierSpec,
    TierUsage,
    TierWorker,
    WorkerContext,
)
from vllm_overlay.tiers.memory import HostBuffer, HostPool


class StoreSettings(TierSettings, kw_only=True, forbid_unknown_fields=True):
    """``shelf`` is part of every name in the store."""

    shelf: Annotated[str, Meta(description="where in the store")]
    capacity_bytes: Annotated[int | str, Meta(description="limit")] = "64 MiB"


@dataclass(frozen=True)
class Address:
    """The part of the handshake, and of every ticket."""

    shelf: str


class StoreManager(TierManager):
    """Evicts nothing, and finds what it has stored even when what was before it in the prompt is gone."""

    def __init__(self, address: Address, capacity_bytes: int, num_ranks: int) -> None:
        self.held: dict[ObjectId, int] = {}
        self._address = address
        self._capacity_bytes = capacity_bytes
        self._num_ranks = num_ranks
        self._stores: dict[int, PlannedObject] = {}
        self._tickets = 0

    def has_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        return [object_id in self.held for object_id in object_ids]

    def advance(self) -> None:
        pass

    def hits(self, geometry: Geometry, keys: Sequence[bytes], num_tokens: int) -> HitSource:
        return BatchedHits(geometry, keys, num_tokens, self)

    def has_or_awaits(self, object_id: ObjectId) -> bool:
        return object_id in self.held or any(planned.object_id == object_id for planned in self._stores.values())

    def reserve(self, planned: PlannedObject) -> StoreTicket | None:
        if self.has_or_awaits(planned.object_id) or self.usage().used_bytes + planned.num_bytes > self._capacity_bytes:
            return None
        self._tickets += 1
        self._stores[self._tickets] = planned
        return StoreTicket(self._tickets, planned, self._address)

    def commit(self, ticket: int) -> None:
        if (planned := self._stores.pop(ticket, None)) is not None:
            self.held[planned.object_id] = planned.num_bytes

    def abort(self, ticket: int) -> None:
        self._stores.pop(ticket)

    def acquire(self, planned: Sequence[PlannedObject]) -> list[LoadTicket] | None:
        if any(item.object_id not in self.held for item in planned):
            return None
        return [LoadTicket(0, item.object_id, item.num_bytes, self._address) for item in planned]

    def release(self, tickets: Sequence[LoadTicket]) -> None:
        pass

    def drop(self, object_id: ObjectId) -> None:
        self.held.pop(object_id, None)

    def usage(self) -> TierUsage:
        used = sum(self.held.values()) * self._num_ranks
        return TierUsage(len(self.held), used, self._capacity_bytes, 0)

    def clear(self) -> None:
        self.held.clear()

    def close(self) -> None:
        pass


class StoreWorker(TierWorker):
    """Every object gets memory of its own."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ObjectId], HostBuffer] = {}
        self._stored: list[StoreResult] = []
        self._fetched: list[FetchResult] = []

    def begin_store(self, ticket: StoreTicket) -> HostBuffer | None:
        return HostPool(1, ticket.planned.num_bytes).buffer((0,), ticket.planned.num_bytes)

    def submit_store(self, ticket: StoreTicket, buffer: HostBuffer) -> None:
        assert isinstance(ticket.part, Address)
        self._kept[ticket.part.shelf, ticket.planned.object_id] = buffer
        self._stored.append(StoreResult(ticket.ticket, buffer.num_bytes, 0.0))

    def cancel_store(self, ticket: StoreTicket, buffer: HostBuffer) -> None:
        pass

    def begin_load(self, load_id: str, tickets: Sequence[LoadTicket]) -> None:
        began = time.monotonic()
        for position, ticket in enumerate(tickets):
            buffer = self._kept[ticket.part.shelf, ticket.object_id]
            seconds = time.monotonic() - began
            result = FetchResult(load_id, position, ticket.object_id, ticket.num_bytes, seconds, buffer)
            self._fetched.append(result)

    def end_fetch(self, load_id: str, position: int) -> None:
        pass

    def cancel_load(self, load_id: str) -> None:
        self._fetched = [result for result in self._fetched if result.load_id != load_id]

    def poll(self) -> tuple[list[StoreResult], list[FetchResult]]:
        stored, self._stored = self._stored, []
        fetched, self._fetched = self._fetched, []
        return stored, fetched

    def close(self, timeout_s: float) -> int:
        return 0


class StoreTierSpec(TierSpec[StoreSettings]):
    """``"tier": "tests.tiers.store_tier:StoreTierSpec"``."""

    settings_type = StoreSettings
    hit_source = "p2p"

    def build_worker(self, context: WorkerContext) -> tuple[StoreWorker, Address]:
        return StoreWorker(), Address(self.settings.shelf)

    def build_manager(self, geometry: Geometry, world_size: int, step_tokens: int, part: Any) -> StoreManager:
        assert part == Address(self.settings.shelf)
        capacity_bytes = parse_bytes(self.settings.capacity_bytes, "capacity_bytes")
        return StoreManager(part, capacity_bytes, world_size)
