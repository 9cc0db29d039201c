# SPDX-License-Identifier: Apache-2.0
"""A worker's half of HybridOffloadConnector: moves bytes as the scheduler's half said, and reports.

Every method is called from the worker's main thread, inside vLLM's hooks; I/O threads stay inside the tier. Copies
between the KV cache and host memory are submitted to the transfer and finish later, in any order. Until a copy has
finished, nothing gives its buffers back and nothing reports its request: the engine would use its blocks.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.common.reasons import Reason
from vllm_overlay.connector.lora.digests import AdapterReports, LoadedAdapters
from vllm_overlay.connector.lora.metadata import AdapterCheck
from vllm_overlay.connector.metadata import LoadJob, OffloadWorkerMetadata, StoreJob
from vllm_overlay.tally import Tally
from vllm_overlay.tiers.base import FetchResult, StoreResult, TierWorker
from vllm_overlay.tiers.memory import HostBuffer
from vllm_overlay.transfer.base import FinishedCopy, Handle, KVTransfer

_log = RateLimitedLog(logging.getLogger(__name__))

_ADVANCE = "advance"
"""Stands for a hook in `vllm:hybrid_offload_hook_errors`: several hooks do this work, and its parts fail one by one."""

_Accepted = tuple[StoreJob, HostBuffer]

_unfinished: list["OffloadWorker"] = []
"""Workers that were closed while copies were under way. Their memory stays until the process ends, because a device may
still write to it."""


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way. ``reason`` says why it has failed, while copies of it are still to finish."""

    job: LoadJob
    started: float
    unfetched: set[int]
    copying: dict[Handle, list[FetchResult]] = field(default_factory=dict)
    num_bytes: int = 0
    reason: Reason | None = None


class OffloadWorker:
    """Serves one tier in one rank."""

    def __init__(
        self, transfer: KVTransfer, tier: TierWorker, adapters: LoadedAdapters, *, load_timeout_s: float, tally: Tally
    ) -> None:
        self._transfer = transfer
        self._tier = tier
        self._adapters = adapters
        self._adapter_reports = AdapterReports(adapters)
        self._load_timeout_s = load_timeout_s
        self._tally = tally
        self._loads: dict[str, _Load] = {}
        self._load_copies: dict[Handle, _Load] = {}
        self._store_copies: dict[Handle, list[_Accepted]] = {}
        self._handed_over: set[int] = set()
        """Store tickets that the transfer or the tier holds. One of the two will end each."""
        self._finished: set[str] = set()
        self._failed_loads: set[str] = set()
        """Those of ``_finished`` that failed. vLLM takes both; the report tells our scheduler why."""
        self._report = OffloadWorkerMetadata()
        """Gathers until it is taken."""
        self._is_pausing = False
        self._bad_blocks: set[int] = set()
        self._step = 0

    def begin_step(self, step: int) -> None:
        """The pass of the scheduler's step of this number begins."""
        self._step = step

    def advance(self) -> None:
        """Take what the transfer and the tier have ready. What raises here is counted, and the rest goes on."""
        # Most steps have nothing under way: what either holds is in one of these tables.
        if self._load_copies or self._store_copies:
            self._fenced(self._take_copies)
        if self._loads or self._handed_over:
            self._fenced(self._take_results)
        if self._load_copies:
            self._fenced(self._take_copies)
        if self._loads:
            self._fenced(self._fail_late_loads)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way or to be reported. It stays so until the scheduler's half has work."""
        under_way = self._loads or self._load_copies or self._store_copies or self._handed_over
        if under_way or self._finished or self._bad_blocks or self._is_pausing or self._report:
            return False
        return self._tally.is_empty() and not self._adapter_reports.have_changed and not self._tier.load_pause_s()

    def _fenced(self, step: Callable[..., None], *args: Any) -> bool:
        """Whether the step ended without an exception."""
        try:
            step(*args)
        except SHUTDOWN:
            raise
        except BaseException as error:
            self._tally.count("hook_errors", label=_ADVANCE)
            _log.warning("advance", "a transfer or a tier failed in a worker: %r", error)
            return False
        return True

    def _take_results(self) -> None:
        stored, fetched = self._tier.poll()
        if stored:
            self._take_stored(stored)
        if fetched:
            self._take_fetched(fetched)

    def _take_stored(self, results: Sequence[StoreResult]) -> None:
        for result in results:
            if result.reason is not None:
                self._end_stores([result.ticket], result.reason)
        if done := [(one.ticket, one.num_bytes, one.seconds) for one in results if one.reason is None]:
            tickets, sizes, seconds = zip(*done, strict=True)
            self._end_stores(tickets)
            self._tally.count("stored_bytes", sum(sizes))
            self._tally.count("stored_objects", len(done))
            self._tally.observe("store_seconds", *seconds)

    def _take_copies(self) -> None:
        for copy in self._transfer.poll():
            if copy.error is not None:
                _log.warning("copy", "a copy between the KV cache and host memory failed: %r", copy.error)
            self._end_gather(self._store_copies.pop(copy.handle, ()), copy)
            if (load := self._load_copies.pop(copy.handle, None)) is not None:
                self._end_scatter(load, copy)

    # Loads.

    def begin_loads(self, jobs: tuple[LoadJob, ...]) -> None:
        """Called before a pass: the tier reads meanwhile. Nothing is written to blocks before ``start_loads``."""
        for job in jobs:
            load = self._loads[job.load_id] = _Load(job, time.monotonic(), set(range(len(job.tickets))))
            if job.tickets and not self._fenced(self._tier.begin_load, job.load_id, job.tickets):
                self._fail_load(load, Reason.HOOK_ERROR)

    def start_loads(self, jobs: tuple[LoadJob, ...], unplanned: tuple[str, ...]) -> None:
        """Called after the pass: this step's loads, which have begun, and all others may write to their blocks.
        ``unplanned`` requests were promised a load that cannot happen."""
        for request_id in unplanned:
            self.fail_request(request_id, Reason.NOT_PLANNED)
        for job in jobs:
            if not job.tickets and (load := self._loads.get(job.load_id)) is not None:
                self._scatter(load, [])
        self.advance()

    def _take_fetched(self, fetched: list[FetchResult]) -> None:
        good: dict[str, list[FetchResult]] = {}
        for result in fetched:
            if result.is_bad:  # also of a load that another one has failed already
                self._report.bad_objects.add(result.object_id)
            elif result.is_unreadable:
                self._report.unreadable_objects.add(result.object_id)
            load = self._loads.get(result.load_id)
            if load is None:
                continue
            if result.buffer is None:
                self._fail_load(load, result.reason or Reason.ERROR)
            else:
                good.setdefault(result.load_id, []).append(result)
        for load_id, results in good.items():
            load = self._loads.get(load_id)
            if load is not None and load.reason is None:
                results.sort(key=lambda result: result.position)
                if not self._fenced(self._scatter, load, results):
                    self._fail_load(load, Reason.HOOK_ERROR)

    def _scatter(self, load: _Load, results: list[FetchResult]) -> None:
        load.unfetched.difference_update(result.position for result in results)
        placements = [load.job.placements[result.position] for result in results]
        buffers = [result.buffer for result in results if result.buffer is not None]
        handle = self._transfer.scatter(placements, buffers, () if load.unfetched else load.job.zeros)
        load.copying[handle] = results
        self._load_copies[handle] = load

    def _end_scatter(self, load: _Load, copy: FinishedCopy) -> None:
        results = load.copying.pop(copy.handle)
        if copy.error is not None:
            self._fail_load(load, Reason.TRANSFER_ERROR)
        elif load.reason is not None:
            self._fail_load(load, load.reason)
        elif not self._fenced(self._end_fetches, load, results):
            self._fail_load(load, Reason.HOOK_ERROR)
        elif not load.unfetched and not load.copying:
            self._end_load(load)

    def _end_fetches(self, load: _Load, results: list[FetchResult]) -> None:
        for result in results:
            self._tier.end_fetch(load.job.load_id, result.position)
            load.num_bytes += result.num_bytes

    def _end_load(self, load: _Load) -> None:
        del self._loads[load.job.load_id]
        self._finished.add(load.job.request_id)
        self._tally.count("loaded_bytes", load.num_bytes)
        self._tally.count("loaded_objects", len(load.job.tickets))

    def _fail_load(self, load: _Load, reason: Reason) -> None:
        """Give a load up, once nothing copies into its blocks any more."""
        load.reason = load.reason or reason
        if not load.copying:
            del self._loads[load.job.load_id]
            self.fail_request(load.job.request_id, load.reason)
            self._fenced(self._tier.cancel_load, load.job.load_id)

    def _fail_late_loads(self) -> None:
        oldest = time.monotonic() - self._load_timeout_s
        late = [load for load in self._loads.values() if load.started < oldest and load.reason is None]
        for load in late:
            if load.unfetched:
                self._fenced(self._tier.load_was_late, load.job.load_id)
            self._fail_load(load, Reason.TIMEOUT)

    def fail_request(self, request_id: str, reason: Reason) -> None:
        """Report the load of a request as failed."""
        self._finished.add(request_id)
        self._failed_loads.add(request_id)
        self._report.failed_loads[request_id] = reason

    def fail_loads(self, jobs: tuple[LoadJob, ...], unplanned: tuple[str, ...], reason: Reason) -> None:
        """An unexpected error hit while starting ``jobs``: none of their requests may wait for ever."""
        for request_id in (*unplanned, *(job.request_id for job in jobs if job.load_id not in self._loads)):
            if request_id not in self._finished:
                self.fail_request(request_id, reason)
        for job in jobs:
            if (load := self._loads.get(job.load_id)) is not None:
                self._fail_load(load, reason)

    def check_adapters(self, checks: tuple[AdapterCheck, ...]) -> None:
        """Called within the pass that first computes with restored blocks, after it has loaded its adapters. If an
        adapter is not what it was at the lookup, vLLM must hear that the blocks are bad. It then computes their
        requests anew."""
        self.fail_checks(tuple(check for check in checks if not self._adapters.computes_with(check.weights)))

    def fail_checks(self, checks: tuple[AdapterCheck, ...]) -> None:
        """What was restored for these requests must not be computed with."""
        for check in checks:
            self._bad_blocks |= check.block_ids
            self._report.failed_loads[check.request_id] = Reason.ADAPTER

    # Stores.

    def store(self, jobs: tuple[StoreJob, ...]) -> None:
        """Submit the copies of this step's objects; after this the engine may reuse every block."""
        accepted: list[_Accepted] = []
        try:
            accepted = self._accept(jobs)
            count = self._gather(accepted)
        except BaseException:
            for job, buffer in accepted:
                if job.ticket.ticket not in self._handed_over:
                    self._fenced(self._tier.cancel_store, job.ticket, buffer)
            raise
        for job, buffer in accepted[count:]:
            self._fenced(self._tier.cancel_store, job.ticket, buffer)
            self._end_stores([job.ticket.ticket], Reason.TRANSFER_FULL)
        self.advance()

    def _accept(self, jobs: Sequence[StoreJob]) -> list[_Accepted]:
        """Those whose adapter is still the same and that the tier has a buffer for. The others have ended."""
        outdated = [
            job.ticket.ticket for job in jobs if job.weights is not None and not self._adapters.have_still(job.weights)
        ]
        if outdated:
            self._end_stores(outdated, Reason.ADAPTER)
            jobs = [job for job in jobs if job.ticket.ticket not in outdated]
        buffers = self._tier.begin_stores([job.ticket for job in jobs])
        if None in buffers:
            without = [job.ticket.ticket for job, buffer in zip(jobs, buffers, strict=True) if buffer is None]
            self._end_stores(without, Reason.STAGING_FULL)
        return [(job, buffer) for job, buffer in zip(jobs, buffers, strict=True) if buffer is not None]

    def _gather(self, accepted: Sequence[_Accepted]) -> int:
        """Submit as many of the first as the transfer has room for; returns how many."""
        submitted, count = 0, len(accepted)
        while count:
            taken = list(accepted[submitted : submitted + count])
            handle = self._transfer.gather([job.placement for job, _ in taken], [buffer for _, buffer in taken])
            if handle is None:
                count //= 2
                continue
            self._store_copies[handle] = taken
            self._handed_over.update([job.ticket.ticket for job, _ in taken])
            submitted += count
            count = min(count, len(accepted) - submitted)
        return submitted

    def _end_gather(self, accepted: Sequence[_Accepted], copy: FinishedCopy) -> None:
        if copy.error is not None:
            for job, buffer in accepted:
                self._end_stores([job.ticket.ticket], Reason.TRANSFER_ERROR)
                self._fenced(self._tier.cancel_store, job.ticket, buffer)
            return
        left = deque([(job.ticket, buffer) for job, buffer in accepted])
        while left and not self._fenced(self._tier.submit_stores, left):
            ticket, _ = left.popleft()
            self._end_stores([ticket.ticket], Reason.HOOK_ERROR)

    def fail_stores(self, jobs: tuple[StoreJob, ...], reason: Reason) -> None:
        """An unexpected error hit while storing ``jobs``: report all that neither the transfer nor the tier holds."""
        tickets = [job.ticket.ticket for job in jobs if job.ticket.ticket not in self._handed_over]
        self._end_stores([ticket for ticket in tickets if ticket not in self._report.reported], reason)

    def _end_stores(self, tickets: Sequence[int], reason: Reason | None = None) -> None:
        """``reason``: why they have failed."""
        self._handed_over.difference_update(tickets)
        dict.update(self._report.reported, dict.fromkeys(tickets, 1))
        if reason is not None:
            self._report.failed_stores.update(tickets)
            self._tally.count("dropped_stores", len(tickets), label=reason)

    # Reports.

    def answer(self, overdue_stores: tuple[int, ...], overdue_loads: tuple[str, ...]) -> None:
        """Say in this step's report which of these this rank does not hold. Their reports were lost."""
        loading = {load.job.request_id for load in self._loads.values()} | self._finished
        self._report.idle_stores = Counter(set(overdue_stores) - self._handed_over - set(self._report.reported))
        self._report.idle_loads = Counter(set(overdue_loads) - loading)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose loads ended since the last call, and those of them that failed."""
        finished, self._finished = self._finished, set()
        failed, self._failed_loads = self._failed_loads, set()
        return finished, failed

    def take_bad_blocks(self) -> set[int]:
        """Blocks that this pass has computed with and should not have."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def take_metadata(self) -> OffloadWorkerMetadata | None:
        """What the scheduler's half must know of this step; None when nothing happened."""
        report, pause_s = self._report, self._tier.load_pause_s()
        report.load_pause_s = pause_s if pause_s or self._is_pausing else None
        self._is_pausing = pause_s > 0
        report.adapters = self._adapter_reports.take_changes()
        if not self._tally.is_empty():
            report.tally = self._tally.take()
        if not report:
            return None
        report.step = self._step
        self._report = OffloadWorkerMetadata()
        return report

    def close(self, timeout_s: float) -> int:
        """Finish pending copies and stores in that time. Returns how many stores were given up."""
        deadline = time.monotonic() + timeout_s
        if not self._fenced(self._end_copies, timeout_s):
            _unfinished.append(self)  # nobody knows what may still write
        given_up = sum(map(len, self._store_copies.values()))
        return given_up + self._tier.close(max(0.0, deadline - time.monotonic()))

    def _end_copies(self, timeout_s: float) -> None:
        if not self._transfer.close(timeout_s):
            _unfinished.append(self)
        self._take_copies()
