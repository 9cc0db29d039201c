# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of HybridOffloadConnector: which tokens to restore, which objects to store."""

import itertools
import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.reasons import Reason
from vllm_overlay.config import TierSettings
from vllm_overlay.connector.explanations import Explanations
from vllm_overlay.connector.first_tokens import FirstTokens
from vllm_overlay.connector.gauges import Gauges
from vllm_overlay.connector.lora.keys import LoraNames
from vllm_overlay.connector.metadata import LoadJob, OffloadMetadata, OffloadWorkerMetadata, StoreJob
from vllm_overlay.connector.pending import PendingReports, PendingStore
from vllm_overlay.connector.placement import BlockIds, Placer
from vllm_overlay.connector.requests import TrackedRequest
from vllm_overlay.connector.store_planner import StorePlanner
from vllm_overlay.connector.token_account import TokenAccount
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tally import Tally
from vllm_overlay.tiers.base import TierManager

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class OffloadScheduler:
    """Serves one tier. Every method is called from the scheduler's thread, in the order of vLLM's connector hooks."""

    def __init__(
        self,
        geometry: Geometry,
        tier: TierManager,
        world_size: int,
        settings: TierSettings,
        tally: Tally,
        *,
        speculative_snapshot_tokens: int,
        num_concurrent_steps: int,
        lookahead_units: int,
    ) -> None:
        """``speculative_snapshot_tokens`` is what that setting stands for. The last two: see ``LoraNames``."""
        self._geometry = geometry
        self._planner = HybridOffloadPlanner(geometry)
        self._placer = Placer(geometry)
        self._tier = tier
        self._max_load_attempts = settings.max_load_attempts
        self._tally = tally
        self._account = TokenAccount(tally)
        self._first_tokens = FirstTokens(tally)
        # Without full attention nothing tells what was lost from what was never there (``lost_tokens``).
        self._explanations = Explanations(settings.name, settings.log_lost_tokens if geometry.full else 0)
        self._gauges = Gauges(
            tally,
            token_bytes=geometry.token_bytes * world_size,
            state_bytes=geometry.state_bytes * world_size,
            chunk_tokens=geometry.chunk_size,
            restore_unit_tokens=geometry.restore_unit,
            dropped_tokens=lookahead_units * geometry.match_unit,
            block_tokens=max(group.block_size for group in geometry.groups),
        )
        self._lora = LoraNames(world_size, num_concurrent_steps, lookahead_units)
        self._pending = PendingReports(world_size, settings.report_timeout_s)
        decoded = settings.store_decoded_tokens
        self._store_planner = StorePlanner(
            self._planner, self._placer, tier, self._pending, tally,
            stores_decoded_tokens=not geometry.recurrent if decoded == "auto" else decoded,
            speculative_snapshot_tokens=speculative_snapshot_tokens,
        )  # fmt: skip
        self._ended_stores: deque[PendingStore] = deque()
        """Empty, but for what an exception kept from being taken in."""
        self._tracked: dict[str, TrackedRequest] = {}
        self._storing: dict[str, TrackedRequest] = {}
        """Those that may have something left to store, or whose first output token was not seen yet: most steps compute
        hundreds that are neither."""
        self._new_loads: list[LoadJob] = []
        self._unplanned_loads: list[str] = []
        self._attempts = itertools.count(1)
        self._loads_resume_at = 0.0
        self._step = 0

    # Lookups and loads.

    def lookup(self, request: "Request", num_local: int) -> int | None:
        """Tokens that a load would add to ``num_local``; sets the request's junction when attention runs ahead. None
        asks for another lookup after this step, which may bring the weights of the request's adapter."""
        started = time.perf_counter()
        try:
            return self._answer(request, num_local)
        finally:
            self._tally.observe("lookup_seconds", time.perf_counter() - started)

    def _answer(self, request: "Request", num_local: int) -> int | None:
        tracked = self._track(request, num_local)
        if tracked.names.should_ask_again:
            return None
        if tracked.names.keys is None:
            return self._no_offer(tracked, Reason.ADAPTER)
        if tracked.failed_loads >= self._max_load_attempts:
            return self._no_offer(tracked, Reason.ATTEMPTS)
        if time.monotonic() < self._loads_resume_at:
            return self._no_offer(tracked, Reason.BREAKER)
        return self._look_up(request, tracked.names.keys, num_local)

    def _no_offer(self, tracked: TrackedRequest, reason: Reason) -> int:
        self._tally.count("lookup_limits", label=reason)
        num_tokens = tracked.request.num_tokens - tracked.num_local
        self._account.looked_up(tracked.request.request_id, num_tokens, {reason: num_tokens})
        self._explanations.not_asked(tracked.request, tracked.num_local, reason)
        return 0

    def _track(self, request: "Request", num_local: int) -> TrackedRequest:
        before = self._tracked.pop(request.request_id, None)
        names = self._lora.names(request, num_local)
        tracked = TrackedRequest(request, names, num_local, request.num_prompt_tokens)
        tracked.failed_loads = before.failed_loads if before is not None else 0
        self._tracked[request.request_id] = self._storing[request.request_id] = tracked
        self._first_tokens.looked_up(request, num_local)
        return tracked

    def _look_up(self, request: "Request", keys: Sequence[bytes], num_local: int) -> int:
        self._tier.advance()
        hits = self._tier.hits(self._geometry, keys, request.num_tokens)
        lookup = self._planner.lookup(keys, request.num_tokens, num_local, hits)
        self._tally.count("lookups")
        self._tally.count("lookup_limits", label=lookup.limited_by)
        self._account.looked_up(request.request_id, request.num_tokens - num_local, lookup.lost)
        self._explanations.looked_up(request, num_local, lookup)
        self._tracked[request.request_id].restore_point = lookup.restore_point
        if lookup.junction > request.shared_prefix_boundary:
            request.shared_prefix_boundary = lookup.junction
        return lookup.num_new_tokens

    def allocated(self, request: "Request", block_ids: BlockIds, num_external_tokens: int) -> None:
        """The scheduler took the offer (or, with 0 tokens, did not): the restore point becomes a load job."""
        tracked = self._tracked.get(request.request_id)
        is_first_call = self._account.admitted(request.request_id, num_external_tokens)
        if tracked is None:
            return
        if num_external_tokens <= 0:
            if is_first_call:
                self._touch(tracked)
            return
        if tracked.names.keys is None:
            self.plan_failed(request.request_id)
            return
        restore_point = tracked.num_local + num_external_tokens
        planned = self._planner.load_plan(tracked.names.keys, tracked.num_local, restore_point)
        planned = [item for item in planned if not self._placer.is_local(item, block_ids)]
        loaded = {item.object_id for item in planned}
        needed = self._planner.last_needed(tracked.names.keys, restore_point)
        # Of a window, what the device cache has.
        self._tier.touch([object_id for object_id in needed if object_id not in loaded])
        tickets = self._tier.acquire(planned)
        if tickets is None:
            self.plan_failed(request.request_id)
            return
        self._pending.add_load(request.request_id, tuple(tickets))
        placements = tuple(self._placer.to_load(planned, block_ids))
        load_id = f"{request.request_id}#{next(self._attempts)}"
        zeros = self._placer.beyond(restore_point, block_ids)
        self._new_loads.append(LoadJob(load_id, request.request_id, tuple(tickets), placements, zeros))
        tracked.names.restored(block_id for placement in placements for block_id in placement.block_ids)

    def _touch(self, tracked: TrackedRequest) -> None:
        """The request goes on from vLLM's own cache or another connector's load: what would restore it here is used."""
        if (keys := tracked.names.keys) is not None:
            boundaries = {tracked.num_local, tracked.restore_point}
            self._tier.touch([used for boundary in boundaries for used in self._planner.last_needed(keys, boundary)])

    def plan_failed(self, request_id: str) -> None:
        """A load was promised and could not be planned. Its request must hear of it, or it would wait for ever."""
        self._account.load_ended(request_id, failed=True)
        self._unplanned_loads.append(request_id)

    # Stores.

    def has_nothing_to_do(self, scheduler_output: "SchedulerOutput") -> bool:
        """Whether this step is one of most: it only decodes, and the workers owe nothing."""
        block_state = scheduler_output.kv_connector_block_state
        offers = block_state is not None and block_state.boundary_state_offloads
        if offers or self._storing or self._pending or self._unplanned_loads or self._ended_stores:
            return False
        self._tier.advance()
        return True

    def begin_step(self, scheduled: Collection[str]) -> OffloadMetadata:
        """This step's loads, the requests that were promised one in vain, and what is to be checked of earlier loads
        now that their requests are ``scheduled``."""
        self._step += 1
        self._first_tokens.step(scheduled)
        self._explanations.step(scheduled)
        checks = self._lora.begin_step(self._step, scheduled)
        loads, self._new_loads = tuple(self._new_loads), []
        unplanned, self._unplanned_loads = tuple(self._unplanned_loads), []
        return OffloadMetadata(loads, (), unplanned, checks, *self._pending.overdue(), self._step)

    def plan_stores(self, scheduler_output: "SchedulerOutput") -> tuple[StoreJob, ...]:
        """This step's stores. When it fails, no ticket of this step stays out."""
        self._tier.advance()
        self._give_up_overdue()
        block_state = scheduler_output.kv_connector_block_state
        if block_state is None:
            return ()
        num_before = self._pending.num_stores
        try:
            num_scheduled = scheduler_output.num_scheduled_tokens
            return tuple(self._store_planner.plan(self._step, self._tracked, self._storing, num_scheduled, block_state))
        except BaseException:
            for ticket in self._pending.take_back(num_before):
                self._tier.abort(ticket)
            raise

    # Completions.

    def update(self, output: "KVConnectorOutput", metadata: OffloadWorkerMetadata | None) -> None:
        """Take in what the workers reported after a step. Stores come last: what a tier raises over one keeps no load
        from ending."""
        if self._has_computed_with_bad_blocks(output):
            self._tally.count("dropped_stores", self._pending.fail_all_stores(), label=Reason.BAD_BLOCKS)
        if metadata is not None:
            self._tally.add(metadata.tally)
            self._ended_stores.extend(self._pending.report_stores(metadata.reported, metadata.failed_stores))
            lost_stores, lost_loads = self._pending.take_lost(metadata.idle_stores, metadata.idle_loads)
            self._ended_stores.extend(lost_stores)
            for request_id in lost_loads:
                self._account.load_ended(request_id, failed=True)
                self._tier.release(self._pending.end_load(request_id))
            for object_id in metadata.bad_objects:
                self._tier.drop(object_id)
            for object_id in metadata.unreadable_objects - metadata.bad_objects:
                self._tier.suspend(object_id)
            for request_id, reason in metadata.failed_loads.items():
                if self._pending.fail_load(request_id):
                    self._load_failed(request_id, reason)
            if metadata.load_pause_s is not None:
                self._loads_resume_at = time.monotonic() + metadata.load_pause_s
            if metadata.adapters:
                self._lora.learn(metadata.step, metadata.adapters)
        failed = output.failed_recving or ()
        for request_id in output.finished_recving or ():
            num_tokens = self._account.load_ended(request_id, failed=request_id in failed)
            self._first_tokens.loaded(request_id, num_tokens)
            self._tier.release(self._pending.end_load(request_id))
        if self._ended_stores:
            self._end_stores()

    def _has_computed_with_bad_blocks(self, output: "KVConnectorOutput") -> bool:
        """Whether another connector's load failed in a pass that computed with it.

        What was copied out in that pass may be wrong under a right name. None of it is committed yet, as its reports
        come with this output or later. Loads of ours are asynchronous: no pass computes with one that failed.
        """
        return bool(output.invalid_block_ids) or any(map(self._may_have_computed, output.failed_recving or ()))

    def _may_have_computed(self, request_id: str) -> bool:
        """Whether a pass has used a failed load of this request. A request that waits for its load is in no pass."""
        if self._pending.is_loading(request_id):
            return False
        tracked = self._tracked.get(request_id)
        return tracked is None or tracked.request.status != RequestStatus.WAITING_FOR_REMOTE_KVS

    def _end_stores(self) -> None:
        """Takes in what has ended: what was stored, at once, or one by one where that fails. So one object's exception
        keeps no other one from being found."""
        stored = [store.ticket for store in self._ended_stores if not store.has_failed]
        error: BaseException | None = None
        try:
            if stored:
                self._tier.commit_all(stored)
        except SHUTDOWN:
            raise
        except BaseException as raised:
            error = raised
        while self._ended_stores:
            store = self._ended_stores.popleft()
            tracked, group_id = self._tracked.get(store.request_id), store.planned.group_id
            cursor = tracked.cursors.get(group_id) if tracked is not None and group_id is not None else None
            if store.has_failed:
                self._tier.abort(store.ticket)
                if tracked is not None and cursor is not None and self._placer.is_full(store.planned):
                    cursor.failed(store.planned, self._step)
                    tracked.next_chunk_tokens = 0
                    self._storing[store.request_id] = tracked
                continue
            if error is not None:
                self._tier.commit(store.ticket)
            if cursor is not None and cursor.retry is not None:
                cursor.stored(store.planned)
        if error is not None:
            raise error

    def _load_failed(self, request_id: str, reason: Reason) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.failed_loads += 1
        self._account.load_ended(request_id, failed=True)
        self._tally.count("failed_loads", label=reason)
        logger.warning("Request %s could not be restored (%s)", request_id, reason)

    def finished(self, request_id: str) -> None:
        """The request is over; a load of it that is still under way keeps its pins until it is reported."""
        self._storing.pop(request_id, None)
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None and tracked.request.num_computed_tokens:
            # Admitted, though a MultiConnector did not say so: it hides what this connector must not store.
            self._account.admitted(request_id, 0)
        self._account.forget(request_id)
        self._explanations.finished(request_id)
        self._first_tokens.finished(request_id)

    @property
    def has_reports_left(self) -> bool:
        """Whether ``update`` could not take in all that workers have reported, and has to be called again."""
        return bool(self._ended_stores)

    @property
    def has_requests(self) -> bool:
        """Whether a request lives that was looked up. Without one the engine may become idle with this step."""
        return bool(self._tracked)

    def has_pending_work(self) -> bool:
        """Whether workers owe reports or the tier has more to take in, for which an idle engine must go on stepping."""
        self._give_up_overdue()
        return self._pending.are_awaited or self._tier.has_more_to_come()

    def _give_up_overdue(self) -> None:
        """Stop waiting for reports that are overdue. What they hold stays held: a copy may still be under way."""
        stores, loads = self._pending.take_overdue()
        for store in stores:
            self._tier.drop(store.planned.object_id)
            self._tally.count("dropped_stores", label=Reason.NOT_REPORTED)
        for load in loads:
            self._tally.count("failed_loads", label=Reason.NOT_REPORTED)
            logger.warning("Request %s could not be restored (%s)", load.request_id, Reason.NOT_REPORTED)

    def clear(self) -> None:
        """Nothing that was stored before is loaded any more, and nothing that was computed before is stored. A request
        that vLLM preempts for the reset is looked up again, and all of it computed anew."""
        for tracked in self._tracked.values():
            tracked.names.pass_by()
        self._tier.clear()

    def close(self) -> None:
        self._tier.close()

    def record_gauges(self) -> None:
        """Puts the tier's usage into the tally."""
        self._gauges.record(
            self._tier.usage(),
            pending_stores=self._pending.num_stores,
            pending_loads=self._pending.num_loads,
            loads_paused=int(time.monotonic() < self._loads_resume_at),
        )

    def completes_local_attention(self, request: "Request") -> bool:
        """See ``Geometry``. Called after an offer for ``request``."""
        names = self._tracked[request.request_id].names
        return self._geometry.completes_local_attention and not names.doubts_local_hits
