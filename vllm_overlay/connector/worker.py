# SPDX-License-Identifier: Apache-2.0
"""A worker's half of HybridOffloadConnector: moves bytes as the scheduler's half said, and reports.

Every method is called from the worker's main thread, inside vLLM's hooks; I/O threads stay inside the tier.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from vllm_overlay.common.reasons import Reason
from vllm_overlay.connector.lora.digests import LoadedAdapters
from vllm_overlay.connector.metadata import AdapterCheck, AdapterWeights, LoadJob, OffloadWorkerMetadata, StoreJob
from vllm_overlay.connector.metrics import OffloadStats
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.base import FetchResult, TierWorker
from vllm_overlay.transfer.base import KVTransfer


@dataclass(slots=True)
class _Load:
    """A load under way: positions still to come."""

    job: LoadJob
    started: float
    missing: set[int] = field(default_factory=set)
    num_bytes: int = 0


class OffloadWorker:
    """Serves one tier in one rank."""

    def __init__(
        self,
        transfer: KVTransfer,
        tier: TierWorker,
        adapters: LoadedAdapters,
        *,
        load_timeout_s: float,
        stats: OffloadStats,
    ) -> None:
        self._transfer = transfer
        self._tier = tier
        self._adapters = adapters
        self._load_timeout_s = load_timeout_s
        self._stats = stats
        self._loads: dict[str, _Load] = {}
        self._finished: set[str] = set()
        self._failed: dict[str, str] = {}
        self._bad_objects: set[ObjectId] = set()
        self._reported: Counter[int] = Counter()
        self._failed_stores: set[int] = set()
        self._is_pausing = False
        self._bad_blocks: set[int] = set()
        self._told_adapters: dict[int, AdapterWeights] = {}
        self._told_version = 0

    # Loads.

    def start_loads(self, jobs: tuple[LoadJob, ...], unplanned: tuple[str, ...]) -> None:
        """Start this step's loads; ``unplanned`` requests were promised one that cannot happen."""
        for request_id in unplanned:
            self.fail_request(request_id, Reason.NOT_PLANNED)
        for job in jobs:
            self._loads[job.load_id] = _Load(job, time.monotonic(), set(range(len(job.tickets))))
            self._tier.begin_load(job.load_id, job.tickets)
        self.advance()

    def advance(self) -> None:
        """Take what the tier has ready: copy fetched objects into the KV cache, note ended stores."""
        stored, fetched = self._tier.poll()
        for result in stored:
            self._end_store(result.ticket, result.reason)
            if not result.reason:
                self._stats.count("stored_bytes", result.num_bytes)
                self._stats.count("stored_objects")
                self._stats.count("store_seconds", result.seconds)
        self._take_fetched(fetched)
        self._fail_late_loads()

    def _take_fetched(self, fetched: list[FetchResult]) -> None:
        good: dict[str, list[FetchResult]] = {}
        for result in fetched:
            load = self._loads.get(result.load_id)
            if load is None:
                continue
            if result.buffer is None:
                if result.is_bad:
                    self._bad_objects.add(result.object_id)
                self._fail_load(load, result.reason or Reason.ERROR)
            else:
                good.setdefault(result.load_id, []).append(result)
        for load_id, results in good.items():
            load = self._loads.get(load_id)
            if load is not None:
                self._scatter(load, sorted(results, key=lambda result: result.position))

    def _scatter(self, load: _Load, results: list[FetchResult]) -> None:
        placements = [load.job.placements[result.position] for result in results]
        self._transfer.scatter(placements, [result.buffer for result in results if result.buffer is not None])
        for result in results:
            self._tier.end_fetch(load.job.load_id, result.position)
            load.missing.discard(result.position)
            load.num_bytes += result.num_bytes
        if not load.missing:
            self._transfer.zero(load.job.zeros)
            self._end_load(load)

    def _end_load(self, load: _Load) -> None:
        del self._loads[load.job.load_id]
        self._finished.add(load.job.request_id)
        self._stats.count("loaded_bytes", load.num_bytes)
        self._stats.count("loaded_objects", len(load.job.tickets))
        self._stats.count("load_seconds", time.monotonic() - load.started)

    def _fail_load(self, load: _Load, reason: Reason) -> None:
        del self._loads[load.job.load_id]
        self._tier.cancel_load(load.job.load_id)
        self.fail_request(load.job.request_id, reason)

    def _fail_late_loads(self) -> None:
        """Nothing but this thread writes to the KV cache, so a load may be given up at any time."""
        oldest = time.monotonic() - self._load_timeout_s
        for load in [load for load in self._loads.values() if load.started < oldest]:
            self._tier.load_was_late(load.job.load_id)
            self._fail_load(load, Reason.TIMEOUT)

    def fail_request(self, request_id: str, reason: Reason) -> None:
        """Report the load of a request as failed."""
        self._finished.add(request_id)
        self._failed[request_id] = reason

    def fail_loads(self, jobs: tuple[LoadJob, ...], reason: Reason) -> None:
        """An unexpected error hit while starting ``jobs``: none of their requests may wait for ever."""
        for job in jobs:
            load = self._loads.get(job.load_id)
            if load is not None:
                self._fail_load(load, reason)
            elif job.request_id not in self._finished:
                self.fail_request(job.request_id, reason)

    def check_adapters(self, checks: tuple[AdapterCheck, ...]) -> None:
        """Within the pass that first computes with restored blocks, after it has loaded its adapters: if one is not
        what it was at the lookup, vLLM must hear that the blocks are bad, and computes their requests anew."""
        for check in checks:
            if not self._adapters.computes_with(check.weights):
                self._bad_blocks |= check.block_ids
                self._failed[check.request_id] = Reason.ADAPTER

    # Stores.

    def store(self, jobs: tuple[StoreJob, ...]) -> None:
        """Copy this step's objects out of the KV cache; after this the engine may reuse every block."""
        accepted = []
        for job in jobs:
            if job.weights is not None and not self._adapters.have_still(job.weights):
                self._end_store(job.ticket.ticket, Reason.ADAPTER)
                continue
            buffer = self._tier.begin_store(job.ticket)
            if buffer is None:
                self._end_store(job.ticket.ticket, Reason.STAGING_FULL)
            else:
                accepted.append((job, buffer))
        try:
            self._transfer.gather([job.placement for job, _ in accepted], [buffer for _, buffer in accepted])
        except Exception:
            for job, buffer in accepted:
                self._tier.cancel_store(job.ticket, buffer)
            raise
        for job, buffer in accepted:
            self._tier.submit_store(job.ticket, buffer)
        self.advance()

    def fail_stores(self, jobs: tuple[StoreJob, ...], reason: Reason) -> None:
        """An unexpected error hit while storing ``jobs``: report all that the tier does not hold."""
        for job in jobs:
            if job.ticket.ticket not in self._reported:
                self._end_store(job.ticket.ticket, reason)

    def _end_store(self, ticket: int, reason: Reason) -> None:
        self._reported[ticket] = 1
        if reason:
            self._failed_stores.add(ticket)
            self._stats.count("dropped_stores", reason=reason)

    # Reports.

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended since the last call, and those of them that failed."""
        finished, self._finished = self._finished, set()
        return finished, finished & set(self._failed)

    def take_bad_blocks(self) -> set[int]:
        """Blocks that this pass has computed with and should not have."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def take_metadata(self) -> OffloadWorkerMetadata | None:
        """What the scheduler's half must know of this step; None when nothing happened."""
        pause_s = self._tier.load_pause_s()
        news = pause_s if pause_s or self._is_pausing else None
        self._is_pausing = pause_s > 0
        metadata = OffloadWorkerMetadata(
            self._reported, self._failed_stores, self._bad_objects, self._failed, news, self._new_adapters()
        )
        self._reported, self._failed_stores = Counter(), set()
        self._bad_objects, self._failed = set(), {}
        return metadata if metadata else None

    def _new_adapters(self) -> Counter[AdapterWeights]:
        if self._told_version == self._adapters.version:
            return Counter()
        loaded = {weights.adapter_id: weights for weights in self._adapters.weights()}
        news = [weights for weights in loaded.values() if self._told_adapters.get(weights.adapter_id) != weights]
        self._told_adapters, self._told_version = loaded, self._adapters.version
        return Counter(news)

    def close(self, timeout_s: float) -> int:
        """Finish pending stores in that time; returns how many were given up."""
        return self._tier.close(timeout_s)
