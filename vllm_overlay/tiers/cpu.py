# SPDX-License-Identifier: Apache-2.0
"""The CPU tier. The scheduler owns the index and says which units of the arena; every worker owns an arena's bytes.

The tier's part of a ticket is the object's units, as a tuple of integers.
"""

import itertools
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from vllm_overlay.common.reasons import Reason
from vllm_overlay.config import MIB, ConfigError, TierSettings, as_size, parse_bytes
from vllm_overlay.planner.coverage import HitSource
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import (
    FetchResult,
    LoadTicket,
    StoreResult,
    StoreTicket,
    TierManager,
    TierRoom,
    TierSpec,
    TierUsage,
    TierWorker,
    WorkerContext,
)
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.memory import (
    Bytes,
    HostBuffer,
    HostPool,
    UnitAllocator,
    available_memory,
    unit_size,
    units_needed,
)
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.factory import learns, make_policy


class CpuTierSettings(TierSettings, kw_only=True):
    """The CPU tier."""

    tier: str = "cpu"
    capacity_bytes: Annotated[
        int | str, Meta(description="Host memory that this engine's tier takes, all ranks together.")
    ] = "4 GiB"


@dataclass(frozen=True, slots=True)
class Arena:
    """The tier's part of the handshake: one rank's memory, the same in all ranks."""

    num_units: int
    unit_bytes: int


def arena_units(capacity_bytes: int, world_size: int, unit_bytes: int, largest_object_bytes: int) -> int:
    """Units of one rank's arena. Raises ConfigError when not even the largest object would fit."""
    num_units = capacity_bytes // world_size // unit_bytes
    needed = units_needed(largest_object_bytes, unit_bytes)
    if num_units < needed:
        raise ConfigError(
            f"capacity_bytes={capacity_bytes} of the CPU tier is smaller than one snapshot and its attention: "
            f"set it to at least {needed * unit_bytes * world_size} bytes"
        )
    return num_units


def check_free_memory(capacity_bytes: int, available_bytes: int) -> None:
    """Raises ConfigError when the arena could not be filled without swapping or being killed.

    vLLM has its weights and its own KV cache by now, which on a CPU come from the same memory.
    """
    if capacity_bytes > available_bytes:
        raise ConfigError(
            f"capacity_bytes={capacity_bytes} of the CPU tier is more than the {available_bytes} bytes of memory that "
            f"are free: set it to at most {available_bytes} or, where vLLM serves on a CPU, have its own KV cache take "
            f"{as_size(capacity_bytes - available_bytes + MIB)} less, by --kv-cache-memory-bytes or by "
            "--gpu-memory-utilization, which is 0.92 of all memory unless given"
        )


class CpuTierManager(TierManager):
    """Index half. Sizes are counted in units of one rank; every rank's arena looks alike."""

    def __init__(
        self, num_units: int, unit_bytes: int, world_size: int, policy: EvictionPolicy[Entry] | None = None
    ) -> None:
        self.index = PrefixIndex(capacity_bytes=num_units * unit_bytes, policy=policy)
        self._num_units = num_units
        self._unit_bytes = unit_bytes
        self._world_size = world_size
        self._units = UnitAllocator(num_units)
        self._tickets = itertools.count(1)
        self._evicted = 0

    def advance(self) -> None:
        """Nothing happens behind the scheduler's back here."""

    def hits(self, geometry: Geometry, keys: Sequence[bytes], num_tokens: int) -> HitSource:
        return self.index

    def has_or_awaits(self, object_id: ObjectId) -> bool:
        return self.index.has_or_awaits(object_id)

    def reserve(self, planned: PlannedObject) -> StoreTicket | None:
        return self.reserve_all([planned])[0]

    def reserve_all(self, planned: Sequence[PlannedObject]) -> list[StoreTicket | None]:
        """Makes room once. Where that is not enough for all of them it goes on one by one."""
        new, keep = self.index.reservable(planned)
        counts = [-(-item.num_bytes // self._unit_bytes) for item in new]
        units = self._take_units(sum(counts), keep)
        if units is None:
            return super().reserve_all(planned) if len(planned) > 1 else [None]
        rows = [units[end - count : end] for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
        tickets = list(itertools.islice(self._tickets, len(new)))
        try:
            self.index.reserve_all(new, tickets, rows, [count * self._unit_bytes for count in counts])
        except BaseException:
            self._units.free(units)
            raise
        given = dict(zip(map(id, new), map(StoreTicket, tickets, new, rows), strict=True))
        return [given.get(id(item)) for item in planned]

    def _take_units(self, count: int, keep: Sequence[ObjectId]) -> tuple[int, ...] | None:
        """So many units, for which others may go, but none of ``keep``; None when there are fewer."""
        evicted = self.index.evict(min(count, self._num_units) * self._unit_bytes, keep)
        self._evicted += len(evicted)
        self._reclaim(evicted)
        return self._units.allocate(count)

    def commit(self, ticket: int) -> None:
        self._reclaim(self.index.commit(ticket).released)

    def commit_all(self, tickets: Sequence[int]) -> None:
        self._reclaim(self.index.commit_all(tickets).released)

    def abort(self, ticket: int) -> None:
        self._reclaim(self.index.abort(ticket))

    def acquire(self, planned: Sequence[PlannedObject]) -> list[LoadTicket] | None:
        entries = self.index.pin([item.object_id for item in planned])
        if entries is None:
            return None
        return [
            LoadTicket(entry.ticket, item.object_id, item.num_bytes, entry.units)
            for entry, item in zip(entries, planned, strict=True)
        ]

    def release(self, tickets: Sequence[LoadTicket]) -> None:
        self._reclaim(self.index.unpin([ticket.object_id for ticket in tickets]))

    def touch(self, object_ids: Sequence[ObjectId]) -> None:
        self.index.touch(object_ids)

    def drop(self, object_id: ObjectId) -> None:
        self._reclaim(self.index.drop(object_id))

    def _reclaim(self, released: Sequence[Entry]) -> None:
        self._units.free([unit for entry in reversed(released) for unit in entry.units])

    def usage(self) -> TierUsage:
        used_units = self._num_units - self._units.num_free
        return TierUsage(
            num_objects=len(self.index),
            used_bytes=used_units * self._unit_bytes * self._world_size,
            capacity_bytes=self._num_units * self._unit_bytes * self._world_size,
            evicted_objects=self._evicted,
        )

    def clear(self) -> None:
        self._reclaim(self.index.clear())

    def close(self) -> None:
        self.index.close()


class CpuTierWorker(TierWorker):
    """Byte half: the arena and a generation tag a unit. Everything happens at once, on the caller's thread."""

    def __init__(self, num_units: int, unit_bytes: int) -> None:
        self._pool = HostPool(num_units, unit_bytes)
        self._tags = array("q", bytes(8 * num_units))
        self._stored: list[StoreResult] = []
        self._fetched: list[FetchResult] = []
        self._started: dict[int, float] = {}

    def host_memory(self) -> Sequence[Bytes]:
        return (self._pool.array,)

    def begin_store(self, ticket: StoreTicket) -> HostBuffer | None:
        self._started[ticket.ticket] = time.perf_counter()
        for unit in ticket.part:
            self._tags[unit] = 0
        return HostBuffer(self._pool.array, ticket.part, ticket.planned.num_bytes)

    def submit_store(self, ticket: StoreTicket, buffer: HostBuffer) -> None:
        for unit in buffer.units:
            self._tags[unit] = ticket.ticket
        seconds = time.perf_counter() - self._started.pop(ticket.ticket)
        self._stored.append(StoreResult(ticket.ticket, ticket.planned.num_bytes, seconds))

    def cancel_store(self, ticket: StoreTicket, buffer: HostBuffer) -> None:
        self._started.pop(ticket.ticket, None)

    def begin_load(self, load_id: str, tickets: Sequence[LoadTicket]) -> None:
        for position, ticket in enumerate(tickets):
            whole = all(map(ticket.ticket.__eq__, map(self._tags.__getitem__, ticket.part)))
            buffer = self._pool.buffer(ticket.part, ticket.num_bytes) if whole else None
            reason = None if whole else Reason.GENERATION
            self._fetched.append(
                FetchResult(load_id, position, ticket.object_id, ticket.num_bytes, 0.0, buffer, reason, not whole)
            )

    def end_fetch(self, load_id: str, position: int) -> None:
        """The units stay the tier's."""

    def cancel_load(self, load_id: str) -> None:
        self._fetched = [result for result in self._fetched if result.load_id != load_id]

    def poll(self) -> tuple[list[StoreResult], list[FetchResult]]:
        stored, self._stored = self._stored, []
        fetched, self._fetched = self._fetched, []
        return stored, fetched

    def close(self, timeout_s: float) -> int:
        return 0


class CpuTierSpec(TierSpec[CpuTierSettings]):
    """``"tier": "cpu"``."""

    settings_type = CpuTierSettings
    hit_source = "host"
    prior_load_weight = 0.95

    @property
    def capacity_bytes(self) -> int:
        return parse_bytes(self.settings.capacity_bytes, "capacity_bytes")

    @property
    def learns(self) -> bool:
        return learns(self.settings.eviction_policy)

    def build_worker(self, context: WorkerContext) -> tuple[CpuTierWorker, Arena]:
        arena = self._arena(context.geometry, context.world_size)
        check_free_memory(self.capacity_bytes, available_memory())
        return CpuTierWorker(arena.num_units, arena.unit_bytes), arena

    def build_manager(self, geometry: Geometry, world_size: int, step_tokens: int, part: Any) -> CpuTierManager:
        assert isinstance(part, Arena)
        policy = make_policy(self.settings.eviction_policy, geometry)
        return CpuTierManager(part.num_units, part.unit_bytes, world_size, policy)

    def room(self, geometry: Geometry, world_size: int, step_tokens: int) -> TierRoom:
        arena = self._arena(geometry, world_size)
        rank_unit_bytes = arena.unit_bytes * world_size
        return TierRoom(
            capacity_bytes=arena.num_units * rank_unit_bytes,
            object_bytes=lambda num_bytes: units_needed(num_bytes, arena.unit_bytes) * rank_unit_bytes,
        )

    def host_bytes(self, geometry: Geometry, world_size: int, step_tokens: int) -> int:
        return self.capacity_bytes

    def _arena(self, geometry: Geometry, world_size: int) -> Arena:
        unit_bytes = unit_size(geometry.smallest_object_bytes)
        num_units = arena_units(self.capacity_bytes, world_size, unit_bytes, geometry.largest_object_bytes)
        return Arena(num_units, unit_bytes)
