# SPDX-License-Identifier: Apache-2.0
"""``"type": "hybrid_disk"``: the disk tier as a secondary tier of vLLM's OffloadingConnector."""

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from vllm_overlay import versions
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.common.reasons import Reason
from vllm_overlay.offloading.connector import engine_being_built
from vllm_overlay.offloading.namespace import namespace_of
from vllm_overlay.offloading.rows import Fetched, RowWorker
from vllm_overlay.offloading.settings import tier_settings
from vllm_overlay.offloading.stats import TierStats, definitions
from vllm_overlay.planner.objects import ObjectId, ObjectKind, PlannedObject, chunk_tag
from vllm_overlay.tiers.base import FetchResult, LoadTicket, StoreResult, StoreTicket
from vllm_overlay.tiers.disk.files.checksum import integrity_of
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.namespace import INTEGRITY, OBJECT_FORMAT
from vllm_overlay.tiers.disk.files.root import open_root
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.memory import PAGE_BYTES

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

ROOM_S = 1.0
"""How long a job's stores wait for room, which an eviction may be making. vLLM does not offer them again."""
_LARGEST_UNIT_BYTES = 4 << 20
"""Of the staging memory: what is verified and copied at once, while the processor's caches have it."""
_log = RateLimitedLog(logging.getLogger(__name__))


@dataclass(slots=True, eq=False)
class _Job:
    """A job of vLLM's, until its result is out. ``left`` are the keys that nothing is known of yet."""

    job_id: int
    is_load: bool
    started: float
    short_s: float
    """``HybridDiskTier._short_s`` at that time."""
    keys: tuple[OffloadKey, ...]
    left: set[OffloadKey]
    done: set[OffloadKey] = field(default_factory=set)
    failed: bool = False

    @property
    def failures(self) -> str:
        """The metric of them."""
        return "failed_loads" if self.is_load else "dropped_stores"


@dataclass(slots=True, eq=False)
class _Store:
    """A row that is to become an object. ``ticket`` once there is room for it."""

    job: _Job
    key: OffloadKey
    row: int
    ticket: StoreTicket | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """A job's objects, pinned, in the order of their tickets."""

    job: _Job
    keys: list[OffloadKey]
    tickets: list[LoadTicket]


class HybridDiskTier(SecondaryTierManager):  # type: ignore[misc, unused-ignore]
    """See vLLM's ``SecondaryTierManager``. All calls come from the scheduler's thread, and none waits for the disk.

    An object is one row: one chunk of one KV cache group, all ranks together. It has no parents: what hangs together
    vLLM knows. So what goes first is what was not used for longest. A disk that hangs keeps no row (``RowWorker``): its
    job fails after ``load_timeout_s``.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        """Called by vLLM's factory. ``given`` is the tier's part of ``secondary_tiers``. Raises ConfigError."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        engine = engine_being_built()
        settings = tier_settings(given, tier_type)
        open_root(Device(), settings.root)
        facts = {INTEGRITY: integrity_of(settings.encryption_key_file).name, OBJECT_FORMAT: versions.DISK_OBJECT}
        root = Path(settings.root)
        self._row_bytes = self.block_size_bytes
        namespace = namespace_of(engine, offloading_spec.config, self._row_bytes, settings.namespace, root, facts)
        unit_bytes = min(-(-self._row_bytes // PAGE_BYTES) * PAGE_BYTES, _LARGEST_UNIT_BYTES)
        self._worker = RowWorker(primary_kv_view, settings, namespace, 0, 1, unit_bytes, self._row_bytes)
        self._manager = DiskTierManager(settings, namespace, 1, self._row_bytes)
        self._timeout_s, self._shutdown_s = settings.load_timeout_s, settings.shutdown_timeout_s
        self._chunk_tokens = [
            group.tokens_per_block * offloading_spec.blocks_per_chunk for group in offloading_spec.config.groups
        ]
        self._stats = TierStats(tier_type, max(self._chunk_tokens))
        self._queue: deque[_Store] = deque()
        """Until there is staging memory for them."""
        self._short_s, self._short_at = 0.0, math.inf
        """For how long in all the first of them has waited for room, up to when. Infinity: it waits for none."""
        self._stores: dict[int, _Store] = {}
        """Being written, by ticket."""
        self._loads: dict[str, _Load] = {}
        self._jobs: dict[int, _Job] = {}
        self._results: list[JobResult] = []
        self._has_advanced = False
        """In this step: so that its lookups find what other engines have stored."""

    # Lookups.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._has_advanced:
            self._has_advanced = True
            self._manager.advance()
        if self._worker.load_pause_s() or not self._manager.has(_object_id(key)):
            return LookupResult.MISS
        return LookupResult.HIT

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._manager.touch([_object_id(key) for key in keys])

    # Stores.

    def submit_store(self, job_metadata: TransferJob) -> None:
        job = self._begin(job_metadata)
        for key, row in _rows(job_metadata):
            if self._is_wanted(_object_id(key)):
                self._queue.append(_Store(job, key, row))
            else:
                self._end_key(job, key)
        self._end_if_done(job)
        self._start_stores()

    def _is_wanted(self, object_id: ObjectId) -> bool:
        return not self._manager.has_or_awaits(object_id) and not self._manager.unwanted([object_id])

    def _start_stores(self) -> None:
        """As many as there is staging memory and room on the disk for. The rows of the others stay lent."""
        while self._queue:
            store = self._queue[0]
            store.ticket = store.ticket or self._reserve(store)
            if store.ticket is None:
                if not self._is_wanted(_object_id(store.key)):  # another job has it under way by now
                    self._end_key(store.job, store.key)
                elif self._short_s < store.job.short_s + ROOM_S:
                    return
                else:
                    self._end_key(store.job, store.key, Reason.NO_ROOM)
            elif (buffer := self._worker.begin_store(store.ticket)) is not None:
                self._stores[store.ticket.ticket] = store
                self._worker.lend(store.ticket.ticket, store.row)
                self._worker.submit_store(store.ticket, buffer)
            else:
                return
            self._queue.popleft()

    def _reserve(self, store: _Store) -> StoreTicket | None:
        now = time.monotonic()
        self._short_s += max(0.0, now - self._short_at)
        ticket = self._manager.reserve(self._planned(store.key))
        self._short_at = math.inf if ticket else now
        return ticket

    def _end_store(self, result: StoreResult) -> None:
        if result.reason is None:
            self._manager.commit(result.ticket)
            self._stats.tally.count("stored_objects")
            self._stats.tally.count("stored_bytes", result.num_bytes)
            self._stats.tally.observe("store_seconds", result.seconds)
        else:
            self._manager.abort(result.ticket)
        store = self._stores.pop(result.ticket)
        self._end_key(store.job, store.key, result.reason)

    # Loads.

    def submit_load(self, job_metadata: TransferJob) -> None:
        job = self._begin(job_metadata)
        load, load_id = _Load(job, [], []), str(job.job_id)
        for key, row in _rows(job_metadata):
            object_id = _object_id(key)
            pinned = self._manager.acquire([self._planned(key)]) if self._manager.has(object_id) else None
            if pinned is None:  # it went since the lookup
                self._end_key(job, key, Reason.MISSING)
                continue
            self._worker.lend((load_id, len(load.keys)), row)
            load.keys.append(key)
            load.tickets += pinned
        if load.tickets:
            self._loads[load_id] = load
            self._worker.begin_load(load_id, load.tickets)
        self._end_if_done(job)

    def _end_fetch(self, result: FetchResult) -> None:
        load = self._loads[result.load_id]
        if result.buffer is not None:
            self._worker.end_fetch(result.load_id, result.position)
            self._stats.tally.count("loaded_objects")
            self._stats.tally.count("loaded_bytes", result.num_bytes)
        elif result.is_bad:
            self._manager.drop(result.object_id)
        elif result.is_unreadable:
            self._manager.suspend(result.object_id)
        self._end_key(load.job, load.keys[result.position], result.reason)
        if not load.job.left:
            self._manager.release(self._loads.pop(result.load_id).tickets)

    # Jobs.

    def _planned(self, key: OffloadKey) -> PlannedObject:
        group = get_offload_group_idx(key)
        return PlannedObject(_object_id(key), (), 0, self._chunk_tokens[group], self._row_bytes, group)

    def _begin(self, job_metadata: TransferJob) -> _Job:
        keys = tuple(job_metadata.keys)
        if not self._queue:
            self._short_at = math.inf
        now = time.monotonic()
        short_s = self._short_s + max(0.0, now - self._short_at)
        job = _Job(job_metadata.job_id, job_metadata.is_promotion, now, short_s, keys, set(keys))
        self._jobs[job.job_id] = job
        return job

    def _end_key(self, job: _Job, key: OffloadKey, failure: Reason | None = None) -> None:
        if key not in job.left:
            return  # its job was given up
        job.left.discard(key)
        if failure is None:
            job.done.add(key)
        else:
            job.failed = True
            self._stats.tally.count(job.failures, label=failure)
        self._end_if_done(job)

    def _end_if_done(self, job: _Job) -> None:
        if not job.left and self._jobs.pop(job.job_id, None) is not None:
            done = tuple(filter(job.done.__contains__, job.keys))
            num_bytes, seconds = len(done) * self._row_bytes, time.monotonic() - job.started
            self._results.append(JobResult(job.job_id, not job.failed, done or None, seconds, num_bytes or None))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        if self._jobs or self._stores:
            self._take_in()
            oldest = time.monotonic() - self._timeout_s
            self._give_up([job for job in self._jobs.values() if job.started < oldest])
            self._start_stores()
        results, self._results = self._results, []
        return results

    def _take_in(self) -> None:
        stored, fetched = self._worker.poll()
        for stored_one in stored:
            self._end_store(stored_one)
        for fetched_one in fetched:
            self._end_fetch(fetched_one)

    def _give_up(self, jobs: Collection[_Job], reason: Reason | None = None) -> None:
        """These jobs have failed, for ``reason`` or because the disk is late. Their rows are vLLM's again, and a thread
        that still has one of their files finds none."""
        if not jobs:
            return
        given_up = set(jobs)
        borrowers: list[int | Fetched] = [ticket for ticket, store in self._stores.items() if store.job in given_up]
        loads = [load_id for load_id, load in self._loads.items() if load.job in given_up]
        borrowers += [(load_id, place) for load_id in loads for place in range(len(self._loads[load_id].keys))]
        self._worker.take_back(borrowers)
        for load_id in loads:
            if reason is None:
                self._worker.load_was_late(load_id)
            self._worker.cancel_load(load_id)
            self._manager.release(self._loads.pop(load_id).tickets)
        for store in [store for store in self._queue if store.job in given_up]:
            self._queue.remove(store)
            if store.ticket is not None:
                self._manager.abort(store.ticket.ticket)
        if reason is None:
            _log.warning(
                "late", "%s: %d jobs were not done in load_timeout_s=%g", self.tier_type, len(jobs), self._timeout_s
            )
        for job in jobs:
            late = Reason.TIMEOUT if job.is_load else Reason.NOT_REPORTED
            self._stats.tally.count(job.failures, len(job.left), reason or late)
            job.failed, job.left = True, set()
            self._end_if_done(job)

    def drain_jobs(self) -> None:
        """vLLM forgets its rows, and perhaps serves other weights from now on (``reset_prefix_cache`` with connectors,
        sleep, new weights). What was stored so far is for the next start, which reads the weights' files."""
        self._take_in()
        self._give_up(list(self._jobs.values()), Reason.CLOSED)
        self._manager.clear()

    # The engine's steps.

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._manager.advance()
        self._has_advanced = False

    def has_pending_work(self) -> bool:
        """Not of writes that were given up: an engine does not step for a disk that hangs."""
        return bool(self._jobs) or self._manager.has_more_to_come()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return definitions()

    def get_stats(self) -> Any:
        num_loads = sum(job.is_load for job in self._jobs.values())
        return self._stats.take(
            self._manager.usage(),
            pending_stores=len(self._jobs) - num_loads,
            pending_loads=num_loads,
            loads_paused=int(self._worker.load_pause_s() > 0),
        )

    def shutdown(self) -> None:
        deadline = time.monotonic() + self._shutdown_s
        while self._jobs and time.monotonic() < deadline:
            self._take_in()
            self._start_stores()
            time.sleep(0.001)
        self._give_up(list(self._jobs.values()), Reason.CLOSED)
        self._worker.close(max(0.0, deadline - time.monotonic()))
        self._worker.return_rows()
        self._manager.close()


def _rows(job_metadata: TransferJob) -> Iterable[tuple[OffloadKey, int]]:
    return zip(job_metadata.keys, map(int, job_metadata.chunk_ids), strict=True)


def _object_id(key: OffloadKey) -> ObjectId:
    """A chunk of one of vLLM's KV cache groups, whatever its kind."""
    return ObjectId(chunk_tag(ObjectKind.FULL_ATTENTION, get_offload_group_idx(key)), get_offload_block_hash(key))
