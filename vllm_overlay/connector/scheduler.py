# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of HybridOffloadConnector: which tokens to restore, which objects to store."""

import itertools
import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from vllm_overlay.common.reasons import Reason
from vllm_overlay.connector.lora.keys import AdapterKeys, Adapters
from vllm_overlay.connector.metadata import (
    AdapterCheck,
    AdapterWeights,
    LoadJob,
    OffloadMetadata,
    OffloadWorkerMetadata,
    StoreJob,
)
from vllm_overlay.connector.metrics import OffloadStats
from vllm_overlay.planner.geometry import Geometry, Group
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner, Lookup
from vllm_overlay.tiers.base import TierManager
from vllm_overlay.transfer.base import Placement, Span

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_MORE_IS_WANTED = (Reason.ATTENTION, Reason.STATE, Reason.WINDOW)
BlockIds = Sequence[Sequence[int]]
T = TypeVar("T")


@dataclass(slots=True)
class _Tracked:
    """What is remembered of a request between its first lookup and its end."""

    request: "Request"
    cursors: dict[int, int] = field(default_factory=dict)
    lookup: Lookup | None = None
    num_local: int = 0
    failed_loads: int = 0
    stalled_at: ObjectId | None = None
    keys: Sequence[bytes] | None = None
    """The names of its objects. None while it is passed by: some of its blocks may be of before the last reset, or it
    is not known which weights of its adapter compute it."""
    weights: AdapterWeights | None = None
    num_found: int = 0
    """Tokens that were in the KV cache when it began, and not from here."""
    is_restored: bool = False


@dataclass(slots=True)
class _PendingStore:
    """A store ticket that is out: reports still to come, one a rank."""

    deadline: float
    missing_reports: int
    failed: bool = False


@dataclass(slots=True)
class _PendingLoad:
    """A load that workers still have to report: what it keeps pinned."""

    deadline: float
    object_ids: tuple[ObjectId, ...]


class OffloadScheduler:
    """Serves one tier. Every method is called from the scheduler's thread, in the order of vLLM's connector hooks."""

    def __init__(
        self,
        geometry: Geometry,
        tier: TierManager,
        world_size: int,
        *,
        max_load_attempts: int,
        report_timeout_s: float,
        stats: OffloadStats,
    ) -> None:
        self._geometry = geometry
        self._planner = HybridOffloadPlanner(geometry)
        self._tier = tier
        self._world_size = world_size
        self._max_load_attempts = max_load_attempts
        self._report_timeout_s = report_timeout_s
        self._stats = stats
        self._adapters = Adapters(world_size)
        self._tracked: dict[str, _Tracked] = {}
        self._beginning: dict[str, _Tracked] = {}
        self._first_passes: list[_Tracked] = []
        self._unchecked: dict[str, AdapterCheck] = {}
        self._loads: dict[str, _PendingLoad] = {}
        self._stores: dict[int, _PendingStore] = {}
        self._new_loads: list[LoadJob] = []
        self._unplanned_loads: list[str] = []
        self._attempts = itertools.count(1)
        self._loads_resume_at = 0.0

    # Lookups and loads.

    def lookup(self, request: "Request", num_local: int) -> int | None:
        """Tokens that a load would add to ``num_local``; sets the request's junction when attention runs ahead.

        None asks for another lookup after this step, which may bring the weights of the request's adapter.
        """
        tracked = self._tracked.setdefault(request.request_id, _Tracked(request))
        tracked.request, tracked.num_local, tracked.lookup = request, num_local, None
        tracked.cursors, tracked.stalled_at = {}, None
        tracked.num_found, tracked.is_restored = num_local, False
        self._leave_adapters(request.request_id)
        if request.lora_request is not None:
            self._beginning[request.request_id] = tracked
        self._name_objects(tracked)
        if tracked.keys is None:
            if self._adapters.may_be_reported(request.lora_request.lora_int_id):
                return None
            self._stats.count("lookup_limits", reason=Reason.ADAPTER)
            return 0
        if tracked.failed_loads >= self._max_load_attempts:
            return 0
        if time.monotonic() < self._loads_resume_at:
            self._stats.count("lookup_limits", reason=Reason.BREAKER)
            return 0
        self._tier.advance()
        lookup = self._planner.lookup(tracked.keys, request.num_tokens, num_local, self._tier.index)
        if lookup.limited_by in _MORE_IS_WANTED:
            known = max(num_local, lookup.restore_point)
            self._tier.look_further(self._planner, tracked.keys, request.num_tokens, known)
        self._stats.count("lookups")
        self._stats.count("queried_tokens", max(0, request.num_tokens - num_local))
        self._stats.count("lookup_limits", reason=str(lookup.limited_by))
        if lookup.junction > request.shared_prefix_boundary:
            request.shared_prefix_boundary = lookup.junction
        tracked.lookup = lookup
        return lookup.num_new_tokens

    def _name_objects(self, tracked: _Tracked) -> None:
        """By block hashes and, with an adapter, what is loaded of it: names that other weights do not have."""
        adapter = tracked.request.lora_request
        if adapter is None:
            tracked.keys = tracked.request.block_hashes
            return
        weights = tracked.weights = self._adapters.loaded(adapter.lora_int_id)
        tracked.keys = AdapterKeys(tracked.request.block_hashes, weights.digest) if weights is not None else None
        self._doubt_what_was_found(tracked)

    def _doubt_what_was_found(self, tracked: _Tracked) -> None:
        """Block hashes do not tell which of several weights of one name and path have computed it."""
        if tracked.weights is not None and not tracked.weights.is_only and tracked.num_found:
            tracked.keys = None

    def allocated(self, request: "Request", block_ids: BlockIds, num_external_tokens: int) -> None:
        """The scheduler took the offer (or, with 0 tokens, did not): the restore point becomes a load job."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or num_external_tokens <= 0:
            return
        if tracked.keys is None:
            self._unplanned_loads.append(request.request_id)
            return
        restore_point = tracked.num_local + num_external_tokens
        planned = self._planner.load_plan(tracked.keys, tracked.num_local, restore_point)
        planned = [item for item in planned if not self._is_local(item, block_ids)]
        tickets = self._tier.acquire(planned)
        if tickets is None:
            self._unplanned_loads.append(request.request_id)
            return
        object_ids = tuple(item.object_id for item in planned)
        self._loads[request.request_id] = _PendingLoad(self._deadline(), object_ids)
        placements = tuple(self._placement(item, block_ids) for item in planned)
        self._new_loads.append(
            LoadJob(
                load_id=f"{request.request_id}#{next(self._attempts)}",
                request_id=request.request_id,
                tickets=tuple(tickets),
                placements=placements,
                zeros=self._spans_beyond(restore_point, block_ids),
            )
        )
        tracked.is_restored = True
        if tracked.weights is not None:
            blocks = frozenset(block_id for placement in placements for block_id in placement.block_ids)
            self._unchecked[request.request_id] = AdapterCheck(request.request_id, tracked.weights, blocks)
        self._stats.count("restored_requests")
        self._stats.count("restored_tokens", num_external_tokens)

    def plan_failed(self, request_id: str) -> None:
        """A load was promised and could not be planned: its request must hear of it, or it would wait for ever."""
        self._unplanned_loads.append(request_id)

    # Stores.

    def begin_step(self, scheduled: Collection[str]) -> OffloadMetadata:
        """This step's loads, the requests that were promised one in vain, and what is to be checked of earlier loads
        now that their requests are ``scheduled``."""
        self._adapters.next_step()
        checks = tuple(_pop_those(scheduled, self._unchecked))
        self._begin_first_passes(scheduled)
        metadata = OffloadMetadata(
            loads=tuple(self._new_loads), failed_loads=tuple(self._unplanned_loads), checks=checks
        )
        self._new_loads, self._unplanned_loads = [], []
        return metadata

    def _begin_first_passes(self, scheduled: Collection[str]) -> None:
        """What vLLM found in its own cache shows only now: lookups are told of whole blocks."""
        begun = _pop_those(scheduled, self._beginning)
        for tracked in begun:
            if not tracked.is_restored:
                tracked.num_found = tracked.request.num_computed_tokens
            self._doubt_what_was_found(tracked)
        self._first_passes = [tracked for tracked in begun if tracked.weights is None]

    def plan_stores(self, scheduler_output: "SchedulerOutput") -> tuple[StoreJob, ...]:
        """This step's stores. When it fails, no ticket of this step stays out."""
        self._tier.advance()
        self._write_off()
        block_state = scheduler_output.kv_connector_block_state
        if block_state is None:
            return ()
        before = set(self._stores)
        try:
            return tuple(self._stores_of_step(scheduler_output.num_scheduled_tokens, block_state))
        except Exception:
            for ticket in set(self._stores) - before:
                del self._stores[ticket]
                self._tier.abort(ticket)
            raise

    def _stores_of_step(self, num_scheduled: dict[str, int], block_state: "KVConnectorBlockState") -> list[StoreJob]:
        jobs: list[StoreJob] = []
        for request_id, num_tokens in num_scheduled.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.keys is not None:
                computed = min(tracked.request.num_computed_tokens + num_tokens, tracked.request.num_tokens)
                jobs += self._store_chunks(tracked, tracked.keys, computed, block_state)
        for request_id, offers in block_state.boundary_state_offloads.items():
            tracked = self._tracked.get(request_id)
            block_ids = block_state.get_block_ids(request_id)
            if tracked is not None and tracked.keys is not None and block_ids is not None:
                jobs += self._store_snapshots(tracked, tracked.keys, offers, block_ids)
        return jobs

    def _store_chunks(
        self, tracked: _Tracked, keys: Sequence[bytes], computed_tokens: int, block_state: "KVConnectorBlockState"
    ) -> list[StoreJob]:
        if not self._has_complete_chunk(tracked, computed_tokens):
            return []
        block_ids = block_state.get_block_ids(tracked.request.request_id)
        if block_ids is None:
            return []
        jobs = []
        stalled: set[int] = set()
        planned = self._planner.store_plan(keys, tracked.cursors, computed_tokens)
        for chunk in planned:
            assert chunk.group_id is not None
            if chunk.group_id in stalled:
                continue
            if not self._tier.should_store(chunk.object_id):
                tracked.cursors[chunk.group_id] = chunk.end_tokens
                continue
            job = self._reserve(tracked, chunk, block_ids)
            if job is not None:
                jobs.append(job)
            elif self._waits_for_room(chunk):
                stalled.add(chunk.group_id)
                continue
            tracked.cursors[chunk.group_id] = chunk.end_tokens
        return jobs

    def _has_complete_chunk(self, tracked: _Tracked, computed_tokens: int) -> bool:
        return any(
            computed_tokens - tracked.cursors.get(group.group_id, 0) >= self._geometry.chunk_size_of(group)
            for group in self._geometry.attention
        )

    def _waits_for_room(self, chunk: PlannedObject) -> bool:
        """Whether a chunk that got no ticket should be tried again: a later one could never be found without it.

        A window's chunk is not waited for: its block may be gone in the next step, and later chunks do without.
        """
        return self._group(chunk.group_id).is_full and not self._tier.index.contains(chunk.object_id)

    def _store_snapshots(
        self, tracked: _Tracked, keys: Sequence[bytes], offers: Sequence[tuple[int, int, int]], block_ids: BlockIds
    ) -> list[StoreJob]:
        pages: dict[int, dict[int, int]] = {}
        for group_id, block_id, boundary in offers:
            pages.setdefault(boundary, {})[group_id] = block_id
        wanted = {group.group_id for group in self._geometry.recurrent}
        jobs = []
        for boundary, states in pages.items():
            known = len(keys) * self._geometry.match_unit
            if set(states) != wanted or boundary > known or not self._geometry.is_restore_point(boundary):
                continue
            snapshot = self._planner.snapshot(keys, boundary)
            if not self._tier.should_store(snapshot.object_id):
                continue
            job = self._reserve(tracked, snapshot, block_ids, states)
            if job is not None:
                jobs.append(job)
        return jobs

    def _reserve(
        self, tracked: _Tracked, planned: PlannedObject, block_ids: BlockIds, states: dict[int, int] | None = None
    ) -> StoreJob | None:
        placement = self._placement(planned, block_ids, states)
        if any(span.block_id == 0 for span in placement.spans) or any(block == 0 for _, block in placement.pages):
            return None
        ticket = self._tier.reserve(planned)
        if ticket is None:
            if not self._tier.index.contains(planned.object_id) and tracked.stalled_at != planned.object_id:
                tracked.stalled_at = planned.object_id
                self._stats.count("dropped_stores", reason=Reason.NO_ROOM)
            return None
        self._stores[ticket.ticket] = _PendingStore(self._deadline(), self._world_size)
        return StoreJob(ticket, placement, tracked.weights)

    # Completions.

    def update(self, output: "KVConnectorOutput", metadata: OffloadWorkerMetadata | None) -> None:
        """Take in what the workers reported after a step."""
        if metadata is not None:
            self._update_stores(metadata)
            for object_id in metadata.bad_objects:
                self._tier.drop(object_id)
            for request_id, reason in metadata.failed_loads.items():
                self._load_failed(request_id, reason)
            if metadata.load_pause_s is not None:
                self._loads_resume_at = time.monotonic() + metadata.load_pause_s
            if metadata.adapters:
                self._learn_adapters(metadata.adapters)
        for request_id in output.finished_recving or ():
            self._end_load(request_id)

    def _learn_adapters(self, reports: Counter[AdapterWeights]) -> None:
        """What other weights have begun is stored no more; requests whose first pass, this step's, brought theirs are
        stored from now on."""
        self._adapters.learn(reports)
        for tracked in self._tracked.values():
            if tracked.weights is not None and tracked.weights != self._adapters.loaded(tracked.weights.adapter_id):
                tracked.keys = None
        for tracked in self._first_passes:
            self._name_objects(tracked)

    def _end_load(self, request_id: str) -> None:
        load = self._loads.pop(request_id, None)
        if load is not None:
            self._tier.release(load.object_ids)

    def _update_stores(self, metadata: OffloadWorkerMetadata) -> None:
        for ticket, reports in metadata.reported.items():
            pending = self._stores.get(ticket)
            if pending is None:
                continue
            pending.missing_reports -= reports
            pending.failed |= ticket in metadata.failed_stores
            if pending.missing_reports > 0:
                continue
            del self._stores[ticket]
            if pending.failed:
                self._tier.abort(ticket)
            else:
                self._tier.commit(ticket)

    def _load_failed(self, request_id: str, reason: Reason) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.failed_loads += 1
        self._stats.count("failed_loads", reason=reason)
        logger.warning("Request %s could not be restored (%s) and is computed instead", request_id, reason)

    def finished(self, request_id: str) -> None:
        """The request is over; a load of it that is still under way keeps its pins until it is reported."""
        self._tracked.pop(request_id, None)
        self._leave_adapters(request_id)

    def _leave_adapters(self, request_id: str) -> None:
        self._unchecked.pop(request_id, None)
        self._beginning.pop(request_id, None)

    def has_pending_work(self) -> bool:
        """Whether workers owe reports or the tier has more to take in, for which an idle engine must go on stepping."""
        self._write_off()
        return bool(self._stores or self._loads) or self._tier.has_more_to_come()

    def _deadline(self) -> float:
        return time.monotonic() + self._report_timeout_s

    def _write_off(self) -> None:
        """Stop waiting for reports that are overdue: a hung disk or a lost report must not keep anything for ever."""
        now = time.monotonic()
        for ticket in list(itertools.takewhile(lambda item: self._stores[item].deadline < now, self._stores)):
            del self._stores[ticket]
            self._tier.abort(ticket)
            self._stats.count("dropped_stores", reason=Reason.NOT_REPORTED)
        for request_id in list(itertools.takewhile(lambda item: self._loads[item].deadline < now, self._loads)):
            self._end_load(request_id)
            self._stats.count("failed_loads", reason=Reason.NOT_REPORTED)

    def clear(self) -> None:
        """Nothing that was stored before is loaded any more, and nothing that was computed before is stored.

        A request that vLLM preempts for the reset is looked up again, and all of it computed anew.
        """
        for tracked in self._tracked.values():
            tracked.keys = None
        self._beginning.clear()
        self._first_passes = []
        self._tier.clear()

    def close(self) -> None:
        self._tier.close()

    def record_gauges(self) -> None:
        """Puts the tier's usage into the stats."""
        usage = self._tier.usage()
        self._stats.gauge("objects", usage.num_objects)
        self._stats.gauge("used_bytes", usage.used_bytes)
        self._stats.gauge("capacity_bytes", usage.capacity_bytes)
        self._stats.gauge("token_bytes", self._geometry.token_bytes * self._world_size)
        self._stats.gauge("state_bytes", self._geometry.state_bytes * self._world_size)
        self._stats.gauge("evicted_objects", usage.evicted_objects)
        self._stats.gauge("pending_stores", len(self._stores))
        self._stats.gauge("pending_loads", len(self._loads))

    @property
    def completes_local_attention(self) -> bool:
        """Whether a state alone can make a restore point of a longer local hit: only the one full-attention group may
        be ahead of it, since vLLM shows nothing of the others' local hits."""
        return bool(self._geometry.recurrent) and len(self._geometry.attention) == len(self._geometry.full) == 1

    # Where objects lie.

    def _group(self, group_id: int | None) -> Group:
        return next(group for group in self._geometry.groups if group.group_id == group_id)

    def _is_local(self, planned: PlannedObject, block_ids: BlockIds) -> bool:
        """Whether it is attention that the device cache has: vLLM shows its null block there."""
        if planned.group_id is None or not self._group(planned.group_id).is_full:
            return False
        group = self._group(planned.group_id)
        return _block_at(block_ids, group, planned.start_tokens // group.block_size) == 0

    def _placement(
        self, planned: PlannedObject, block_ids: BlockIds, states: dict[int, int] | None = None
    ) -> Placement:
        """Where an object is (store) or goes (load). ``states`` are the offered blocks of a snapshot to store; a
        snapshot to load goes to the block that vLLM allocated for the boundary."""
        if planned.group_id is None:
            return self._snapshot_placement(planned, block_ids, states)
        group = self._group(planned.group_id)
        index, offset = divmod(planned.start_tokens, group.block_size)
        block_id = _block_at(block_ids, group, index)
        if not self._geometry.is_splittable(group):
            return Placement(pages=((group.group_id, block_id),))
        return Placement(spans=(Span(group.group_id, block_id, offset, planned.end_tokens - planned.start_tokens),))

    def _snapshot_placement(
        self, planned: PlannedObject, block_ids: BlockIds, states: dict[int, int] | None
    ) -> Placement:
        boundary, tail = planned.end_tokens, planned.end_tokens - planned.start_tokens
        pages = []
        for group in self._geometry.recurrent:
            block_id = (
                states[group.group_id]
                if states is not None
                else _block_at(block_ids, group, (boundary - 1) // group.block_size)
            )
            pages.append((group.group_id, block_id))
        spans = []
        for group in self._geometry.attention if tail else ():
            if self._geometry.is_splittable(group):
                index, offset = divmod(planned.start_tokens, group.block_size)
                spans.append(Span(group.group_id, _block_at(block_ids, group, index), offset, tail))
        return Placement(tuple(pages), tuple(spans))

    def _spans_beyond(self, restore_point: int, block_ids: BlockIds) -> tuple[Span, ...]:
        """The rest of the last attention block of each group: vLLM does not clear what a connector says it loads."""
        spans = []
        for group in self._geometry.attention:
            index, offset = divmod(restore_point, group.block_size)
            if offset and self._geometry.is_splittable(group):
                block_id = _block_at(block_ids, group, index)
                spans.append(Span(group.group_id, block_id, offset, group.block_size - offset))
        return tuple(spans)


def _pop_those(names: Collection[str], table: dict[str, T]) -> list[T]:
    """Takes what ``table`` has under ``names`` out of it."""
    return [table.pop(name) for name in list(table) if name in names]


def _block_at(block_ids: BlockIds, group: Group, index: int) -> int:
    """The block with that index in the request's table; 0, vLLM's null block, when the table does not reach it."""
    blocks = block_ids[group.group_id]
    return blocks[index] if index < len(blocks) else 0
