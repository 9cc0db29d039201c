# SPDX-License-Identifier: Apache-2.0
"""The worker's half of the MultiConnector: each child gets its own part, and each request one report.

An isolated child's blocks are given back once it has reported what it owes, or was shut down. A class without a
``shutdown`` of its own cannot be stopped, so it has to report. If ``shutdown`` raises, the child is asked for its
reports and shut down again at growing intervals. Until then what it owes is in quarantine: no block of it is freed, no
load of it is reported failed, and no new instance is built. So quarantine never holds more than was under way when the
child failed.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from vllm_overlay.common.backoff import Backoff
from vllm_overlay.multi_connector import validation
from vllm_overlay.multi_connector.child import Child
from vllm_overlay.multi_connector.completion import Completions
from vllm_overlay.multi_connector.metadata import (
    Duty,
    MultiHandshakeMetadata,
    MultiKVEvents,
    MultiMetadata,
    MultiWorkerMetadata,
    Order,
)
from vllm_overlay.multi_connector.settings import MultiSettings
from vllm_overlay.named_child import QuietResults, QuietStep

_EVENTS = validation.optional(KVConnectorKVEvents)


class WorkerSide:
    """Every method is called from the thread that runs the model; those with the name of a hook, by that hook."""

    def __init__(self, children: Sequence[Child], settings: MultiSettings) -> None:
        self._children = children
        self._clock: Callable[[], float] = time.monotonic
        self._completions = Completions()
        self._orders = tuple(Order(child.generation, Duty.SERVE) for child in children)
        self._new_backoff = partial(Backoff, settings.retry_first_s, settings.retry_longest_s)
        self._stop_attempts = [self._new_backoff() for _ in children]
        self._unknown_requests: list[set[str]] = [set() for _ in children]
        self._handshakes: dict[int, dict[tuple[int, int], KVConnectorHandshakeMetadata]] = {}
        self.working = children
        """Children with something to do in this step."""
        self.quiet: set[Child] = set()
        """Children that had nothing under way and nothing to report, and have had nothing to do since."""
        self._all_serve = True
        """Whether the scheduler's orders are the usual ones."""
        self.is_silent = False
        """Whether there is nothing to report: all children are quiet, all is as usual, and no work has come since."""

    # ---- Start.

    def get_handshake_metadata(self) -> MultiHandshakeMetadata | None:
        parts = tuple(child.start("get_handshake_metadata") for child in self._children)
        return MultiHandshakeMetadata(parts) if any(part is not None for part in parts) else None

    # ---- A step's way.

    def handle_preemptions(self, kv_connector_metadata: MultiMetadata | QuietStep) -> None:
        if isinstance(metadata := kv_connector_metadata, QuietStep):
            return
        self._obey(metadata)
        for child, part in self._parts(metadata):
            if not child.wants_preempted_ids:
                child.call("handle_preemptions", None, part)
            elif preempted := set(metadata.preempted) - self._unknown_requests[child.index]:
                child.call("handle_preemptions", None, preempted)

    def bind_connector_metadata(self, metadata: MultiMetadata | QuietStep) -> None:
        if isinstance(metadata, QuietStep):
            self.working = ()
            return
        self._obey(metadata)
        self.working = [child for child, _ in self._parts(metadata)]
        self.quiet.difference_update(self.working)
        for request_id, holders in metadata.saves.items():
            self._completions.expect_saves(request_id, holders)
        for request_id in metadata.releases:
            self._completions.release(request_id)
        self._completions.requests_changed(metadata.arrived, metadata.departed)
        for request_id, load in metadata.loads.items():
            if self._children[load.child].in_service:
                self._completions.expect_load(request_id, load)
            else:
                # Its part of this metadata reaches no hook of it, so nothing will write.
                self._completions.refuse_load(request_id, load)
        for child, part in self._parts(metadata):
            child.call("bind_connector_metadata", None, part)

    def clear_connector_metadata(self) -> None:
        for child in self.working:
            child.call("clear_connector_metadata", None)

    def _parts(self, metadata: MultiMetadata) -> list[tuple[Child, KVConnectorMetadata | None]]:
        """Children in service that have something to do, with their part of the scheduler's metadata."""
        return [
            (child, part)
            for child, part in zip(self._children, metadata.children, strict=True)
            if not (child.isolated or child.standing_by or isinstance(part, QuietStep))
        ]

    def _obey(self, metadata: MultiMetadata) -> None:
        """Carries out the scheduler's orders, once however many hooks bring this step's metadata."""
        self.is_silent = False
        self._orders = metadata.orders
        self._all_serve = {order.duty for order in metadata.orders} <= {Duty.SERVE}
        for index, request_ids in metadata.unknown_requests.items():
            self._unknown_requests[index] = set(request_ids)
        for child, order in zip(self._children, metadata.orders, strict=False):
            if order.generation > child.generation:
                self._renew(child, order.generation)
            if order.duty is Duty.STOP:
                child.isolate("the scheduler process took it out of service")
            elif order.duty is Duty.SERVE:
                child.standing_by = False

    def _renew(self, child: Child, generation: int) -> None:
        """Builds the new instance. The old one has been stopped on every rank."""
        self._handshakes.pop(child.index, None)
        self.quiet.discard(child)
        self._stop_attempts[child.index] = self._new_backoff()
        if not child.renew(generation):
            return
        own = child.call(
            "get_handshake_metadata", None, parse=validation.optional(KVConnectorHandshakeMetadata), always=True
        )
        if own is not None:
            self._handshakes[child.index] = {_rank(): own}

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """This rank's reports. Also where an isolated child is stopped and what it owed is released."""
        if self.is_silent:
            return KVConnectorTransferResults()
        for child in self._children:
            if child not in self.quiet and child.in_service:
                self._collect(child, self._without_unknown(child, finished_req_ids))
        for child in self._children:
            if child.isolated:
                # No later step can tell vLLM of them, so they do not wait until the child is stopped.
                self._completions.fail_synchronous(child.index)
            if child.isolated and not child.stopped:
                self._stop(child, self._without_unknown(child, finished_req_ids))
            if child.stopped:
                self._completions.abandon(child.index)
        for unknown in self._unknown_requests if finished_req_ids else ():
            unknown -= finished_req_ids
        all_quiet = self._all_serve and len(self.quiet) == len(self._children)
        self.is_silent = all_quiet and not any(child.isolated or child.tally.counters for child in self._children)
        return self._completions.take()

    def _without_unknown(self, child: Child, request_ids: set[str]) -> set[str]:
        return request_ids - self._unknown_requests[child.index]

    def _collect(self, child: Child, finished_req_ids: set[str]) -> None:
        results = child.call(
            "get_transfer_results", None, finished_req_ids, parse=validation.transfer_results, always=True
        )
        if results is None:
            return
        if isinstance(results, QuietResults):
            if child not in self.working:  # which may still begin something, later in this step
                self.quiet.add(child)
            return

        def take_errors(answer: Any) -> bool:
            self._completions.load_errors(child.index, validation.block_ids(answer))
            return True

        # Asked now rather than when vLLM asks us: a load must not be reported good before its errors are known.
        knows_errors = child.call("get_block_ids_with_load_errors", False, parse=take_errors, always=True)
        received, failed = results.finished_recving, results.failed_recving
        if not knows_errors:
            failed = failed | received
        ignored = self._completions.received(child.index, received, failed)
        ignored += self._completions.sent(child.index, results.finished_sending)
        child.tally.count("ignored_reports", ignored)

    def _stop(self, child: Child, finished_req_ids: set[str]) -> None:
        """One step of ending an isolated instance: see the top of this file."""
        attempts = self._stop_attempts[child.index]
        if child.can_be_stopped and attempts.may_try(self._clock()):
            if child.stop():
                return
            attempts.failed(self._clock())
        if self._completions.owes(child.index):
            self._collect(child, finished_req_ids)
        if not self._completions.owes(child.index):
            # Nothing is left that it could touch, whatever became of its shutdown.
            child.stopped = True

    def get_block_ids_with_load_errors(self) -> set[int]:
        """What the last ``get_transfer_results`` found, which vLLM calls just before in every step."""
        return self._completions.take_invalid_blocks()

    def get_kv_connector_kv_cache_events(self) -> MultiKVEvents | None:
        events: dict[int, KVConnectorKVEvents] = {}
        for child in self._children:
            if child in self.quiet:
                continue
            if (own := child.call("get_kv_connector_kv_cache_events", None, parse=_EVENTS)) is not None:
                events[child.index] = own
        return MultiKVEvents(events) if events else None

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        """Each child's part, and how the scheduler's orders went. Every rank speaks while an order is unusual."""
        if self.is_silent:
            return None
        parts = [
            None
            if child in self.quiet
            else child.call("build_connector_worker_meta", None, parse=validation.worker_metadata)
            for child in self._children
        ]
        stopping = {index for index, order in enumerate(self._orders) if order.duty is Duty.STOP}
        standing_by = {index for index, order in enumerate(self._orders) if order.duty is Duty.STAND_BY}
        isolated = {child.index for child in self._children if child.isolated}
        if not (stopping or standing_by or isolated or any(part is not None for part in parts)):
            return None
        unstopped = frozenset(index for index in stopping if not self._children[index].stopped)
        handshakes = {index: own for index, own in self._handshakes.items() if index in standing_by}
        return MultiWorkerMetadata(tuple(parts), self._orders, frozenset(isolated - stopping), unstopped, handshakes)


def _rank() -> tuple[int, int]:
    """(pipeline rank, tensor rank) of this worker, as vLLM keys handshake metadata at start."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group, model_parallel_is_initialized

    if not model_parallel_is_initialized():
        return 0, 0
    return get_pp_group().rank_in_group, get_tp_group().rank_in_group
