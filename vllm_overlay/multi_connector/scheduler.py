# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of the MultiConnector: a request's way and a step's way through the children.

Which child loads is in ``lookup.py``, which children are in service in ``lifecycle.py``.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_overlay.multi_connector import validation
from vllm_overlay.multi_connector.child import Child
from vllm_overlay.multi_connector.children import ChildSpec
from vllm_overlay.multi_connector.choice import Choice
from vllm_overlay.multi_connector.control_file import ControlFile
from vllm_overlay.multi_connector.lifecycle import Phase, Supervisor
from vllm_overlay.multi_connector.lookup import Lookups
from vllm_overlay.multi_connector.metadata import NULL_BLOCK, Load, MultiKVEvents, MultiMetadata, MultiWorkerMetadata
from vllm_overlay.multi_connector.outstanding import OpenLoad, OutstandingReports
from vllm_overlay.multi_connector.request_filter import RequestFilter
from vllm_overlay.multi_connector.settings import MultiSettings
from vllm_overlay.multi_connector.weights import StepTimes
from vllm_overlay.named_child import QuietStep

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_METADATA = validation.optional(KVConnectorMetadata)
_QUIET_STEP = QuietStep()

PAID_ELSEWHERE = 10**6
"""Taken for the number of waiting requests if another engine has computed the prompt of a request for this engine. So
that request is loaded, whatever that takes."""


class SchedulerSide:
    """Every method is called from the scheduler's thread; those with the name of a hook, by that hook."""

    def __init__(
        self, children: Sequence[Child], settings: MultiSettings, specs: Sequence[ChildSpec], has_recurrent_groups: bool
    ) -> None:
        """``has_recurrent_groups``: a hit of a whole prompt cannot be used, as a state cannot be rewound by a token."""
        self._children = children
        self._isolate_after_s = settings.isolate_after_s
        self._clock: Callable[[], float] = time.monotonic
        self._control = ControlFile(settings.control_file, {spec.name: spec.settings for spec in specs})
        self._filters = [RequestFilter() for _ in children]
        self._builders = [partial(child.call, "build_connector_meta", None, parse=_METADATA) for child in children]
        self.choice = Choice([spec.load_weight for spec in specs])
        self.lookups = Lookups(children, self._control, self._filters, self.choice, settings, has_recurrent_groups)
        self.supervisor = Supervisor(children, settings.retry_first_s, settings.retry_longest_s)
        self._outstanding = OutstandingReports()
        self._step_times = StepTimes()

        # Tables of requests; each entry goes when its request finishes or, where said, is reported.
        self._living: set[str] = set()
        self._admitted: set[str] = set()
        self._partial_tails: dict[str, set[int]] = {}
        self._next = MultiMetadata()
        self._parts: tuple[KVConnectorMetadata | None, ...] = (None,) * len(children)
        """What each child has said to its workers in the latest step."""

        self._kv_cache_manager: KVCacheManager | None = None
        self.some_ranks_are_silent = False
        """Whether a finished request is reported by fewer ranks than there are."""

    # ---- Start.

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        self._kv_cache_manager = kv_cache_manager
        for child in self._children:
            child.start("bind_kv_cache_manager", kv_cache_manager, again=True)

    def set_handshake(self, hook: str, metadata: Mapping[Any, KVConnectorHandshakeMetadata]) -> None:
        """Gives each child its own part of every rank's; empty, as vLLM gives it to a child alone, if it has none."""
        for child in self._children:
            parts = {rank: part.children[child.index] for rank, part in metadata.items()}
            child.start(hook, {rank: part for rank, part in parts.items() if part is not None})

    # ---- A request's way.

    def on_new_request(self, request: "Request") -> None:
        self._arrive(request.request_id)
        for child in self._children:
            if child.in_service:
                child.call("on_new_request", None, request)
            else:
                self._filters[child.index].add_unknown(request.request_id)

    def _arrive(self, request_id: str) -> None:
        if request_id not in self._living:
            self._living.add(request_id)
            self._next.arrived.add(request_id)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        now = self._clock()
        self._control.look(now)
        self._arrive(request.request_id)
        num_waiting = len(self._living) - len(self._admitted) - (request.request_id not in self._admitted)
        step_s = self._step_times.one_more_s
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            num_waiting, step_s = PAID_ELSEWHERE, 0.0
        self.choice.about_to_decide(num_waiting, self._outstanding.loads_under_way(now), step_s)
        return self.lookups.find(request, num_computed_tokens, now)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        unspecified = {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens} if num_external_tokens else {}
        if (child := self.lookups.chosen(request.request_id)) is None:
            return unspecified
        return child.call(
            "get_external_cache_hit_sources", unspecified, request, num_external_tokens, parse=validation.hit_sources
        )

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        request_id = request.request_id
        loader = self.lookups.chosen(request_id) if num_external_tokens > 0 else None
        self._decide_who_works(request_id, loader)
        for child in self._working_on(request_id):
            tokens = num_external_tokens if child is loader else 0
            child.call("update_state_after_alloc", None, request, blocks, tokens)
        self.lookups.count(request_id, num_external_tokens, self._clock())
        if loader is None:
            return
        # If the child has just raised it is isolated, its part of the metadata is never sent, and the workers refuse
        # this load, so the request is told that it failed.
        lookup = self.lookups.by_request[request_id]
        is_synchronous = not lookup.replies[loader.index].asynchronous
        load = Load(loader.index, self._loaded_blocks(lookup.local_tokens, blocks), is_synchronous)
        self._next.loads[request_id] = load
        self._outstanding.load_started(request_id, load, num_external_tokens, self._clock())
        if is_synchronous:
            loader.tally.count("loaded_tokens", num_external_tokens)

    def _loaded_blocks(self, num_local: int, blocks: "KVCacheBlocks") -> tuple[int, ...]:
        """The request's blocks of all groups that hold what follows its local hit: no other request reads them.

        Without vLLM's cache manager, which knows how many tokens a block has, all of its blocks.
        """
        block_ids = blocks.get_block_ids()
        first = [0] * len(block_ids)
        if self._kv_cache_manager is not None:
            managers = self._kv_cache_manager.coordinator.single_type_managers
            first = [num_local // manager.block_size for manager in managers]
        loaded = {block for ids, start in zip(block_ids, first, strict=True) for block in ids[start:]}
        return tuple(sorted(loaded - {NULL_BLOCK}))

    def _decide_who_works(self, request_id: str, loader: Child | None) -> None:
        """At a request's first admission: children that must not store it get no more of it than they need to load."""
        if request_id in self._admitted:
            return
        self._admitted.add(request_id)
        for child, request_filter in zip(self._children, self._filters, strict=True):
            settings = self._control.settings[child.name]
            if child is loader:
                if not settings.store:
                    request_filter.give_no_work_after_this_step(request_id)
            elif not settings.store or (loader is not None and not settings.promote):
                request_filter.give_no_work(request_id)

    def register_finished_partial_tail(
        self, request: "Request", block_ids: tuple[list[int], ...], partial_tail_offloads: list[tuple[int, int, int]]
    ) -> bool:
        """Called just before ``request_finished_all_groups``; a child that says True in either owes one report."""
        hook, arguments = "register_finished_partial_tail", (request, block_ids, partial_tail_offloads)
        working = self._working_on(request.request_id)
        if holders := {child.index for child in working if child.call(hook, False, *arguments, parse=validation.truth)}:
            self._partial_tails[request.request_id] = holders
        return bool(holders)

    def _working_on(self, request_id: str) -> list[Child]:
        """Children that see the request's blocks and steps."""
        return [child for child in self._children if self._filters[child.index].works_on(request_id)]

    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """For all groups; a child without hybrid support is told of the only one."""
        request_id = request.request_id
        holders = self._partial_tails.pop(request_id, set())
        parameters: dict[str, Any] = {}
        for child, request_filter in zip(self._children, self._filters, strict=True):
            if request_filter.is_unknown(request_id):
                continue
            works = request_filter.works_on(request_id)
            own_ids = block_ids if works else tuple([] for _ in block_ids)
            if isinstance(child.connector, SupportsHMA):
                answer = child.call("request_finished_all_groups", None, request, own_ids, parse=validation.finished)
            else:
                answer = child.call("request_finished", None, request, own_ids[0], parse=validation.finished)
            # Out of service: until it has been stopped everywhere, a save it has begun may still read these blocks.
            holds, own = (works and self._may_still_read(child), None) if answer is None else answer
            if holds:
                holders.add(child.index)
            if own and (clashes := sorted(set(own) & set(parameters))):
                message = "returned kv_transfer_params %s that another child has set. They are dropped."
                child.log_once("parameters", message, clashes)
            parameters = {**(own or {}), **parameters}
        self._forget(request_id)
        if holders:
            self._next.saves[request_id] = frozenset(holders)
            self._outstanding.hold(request_id, holders)
        return bool(holders), parameters or None

    def _may_still_read(self, child: Child) -> bool:
        self.supervisor.notice_isolations(self._clock)
        return self.supervisor.lifecycles[child.index].phase is Phase.STOPPING

    def _forget(self, request_id: str) -> None:
        self.lookups.forget(request_id)
        self._outstanding.blocks_are_given_back(request_id)
        self._living.discard(request_id)
        if request_id in self._next.arrived:
            self._next.arrived.discard(request_id)
        else:
            self._next.departed.add(request_id)
        self._admitted.discard(request_id)
        for request_filter in self._filters:
            request_filter.finished(request_id)

    # ---- A step's way.

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> MultiMetadata | QuietStep:
        now = self._clock()
        if self._isolate_after_s > 0 and self._outstanding.loads:
            for index in self._outstanding.overdue(now - self._isolate_after_s):
                self._children[index].isolate("a load has been under way for longer than isolate_after_s")
        metadata = self._next
        loads = metadata.loads.values()
        metadata.children = self._parts = tuple(
            [
                one.plan(scheduler_output, build, _blocks_of_others(loads, i) if loads else ())
                for i, (one, build) in enumerate(zip(self._filters, self._builders, strict=True))
            ]
        )
        if scheduler_output.preempted_req_ids:
            metadata.preempted = set(scheduler_output.preempted_req_ids)
            for request_id in metadata.preempted - metadata.loads.keys():
                self._outstanding.blocks_are_given_back(request_id)
        scheduled = scheduler_output.num_scheduled_tokens
        num_drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        self._step_times.planned(scheduler_output.total_num_scheduled_tokens - num_drafts, len(scheduled), now)
        is_at_rest = self.supervisor.is_at_rest()
        if not is_at_rest:
            self.supervisor.notice_isolations(self._clock)
            self.supervisor.try_again(self._held_for, self._clock)
        if metadata.is_quiet and (is_at_rest or not self.supervisor.needs_steps):
            return _QUIET_STEP
        metadata.orders = self.supervisor.send_orders()
        self._next = MultiMetadata()
        return metadata

    @property
    def _held_for(self) -> set[int]:
        """Children for which blocks are held since the last step; the workers do not know of it yet."""
        return {index for children in self._next.saves.values() for index in children}

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Shows each child its part, and keeps from vLLM the reports it would assert on."""
        now = self._clock()
        has_news = not connector_output.is_empty()
        worker_metadata = connector_output.kv_connector_worker_meta
        ranks = worker_metadata if isinstance(worker_metadata, MultiWorkerMetadata) else None
        for child, part in zip(self._children, self._parts, strict=True):
            if has_news or not isinstance(part, QuietStep):
                self._show_reports(child, connector_output, ranks)
        if not has_news:
            return
        ended = self._outstanding.loads_ended(connector_output.finished_recving or ())
        bad_blocks = connector_output.invalid_block_ids
        for request_id, load in ended.items():
            failed = request_id in connector_output.failed_recving or not bad_blocks.isdisjoint(load.blocks)
            self._load_ended(request_id, load, now - load.started, failed)
        sent = self._outstanding.saves_ended(connector_output.finished_sending or ())
        if self.some_ranks_are_silent:
            self._next.releases |= sent
        connector_output.finished_recving = set(ended) or None
        connector_output.finished_sending = sent or None
        if bad_blocks:
            for request_id, index in self._outstanding.synchronous_loads_failed(bad_blocks):
                self._load_failed(request_id, index)
        if ranks is not None:
            for child in self.supervisor.receive(ranks, self._clock):
                self._filters[child.index].reset(self._living)
                self._next.unknown_requests[child.index] = frozenset(self._living)

    def step_ended(self) -> None:
        """Called by ``take_events``, which vLLM asks once for each step it planned, in their order.

        ``update_connector_output`` it calls for a step without tokens only where several ranks answer, or has news.
        """
        if (measured := self._step_times.ended(self._clock())) is not None:
            self.choice.prefill.step_ended(*measured)

    def _show_reports(self, child: Child, output: "KVConnectorOutput", ranks: MultiWorkerMetadata | None) -> None:
        """A child that changes them is isolated: the reports are its siblings' too."""
        events = output.kv_cache_events
        view = self._outstanding.view(
            child.index,
            output,
            kv_connector_worker_meta=None if ranks is None else ranks.children[child.index],
            kv_cache_events=events.children.get(child.index) if isinstance(events, MultiKVEvents) else None,
            kv_connector_stats=None,
        )
        shown = view.finished_sending, view.finished_recving
        child.call("update_connector_output", None, view, parse=partial(_check_unchanged, view, shown))

    def _load_ended(self, request_id: str, load: OpenLoad, seconds: float, failed: bool) -> None:
        if failed:
            self._load_failed(request_id, load.child)
        else:
            tally = self._children[load.child].tally
            tally.count("loaded_tokens", load.tokens)
            tally.observe("load_seconds", seconds)
        self.choice.load_ended(load.child, load.tokens, seconds, failed)

    def _load_failed(self, request_id: str, index: int) -> None:
        self._children[index].tally.count("failed_loads")
        self.lookups.load_failed(request_id, index)

    def has_pending_push_work(self) -> bool:
        working = any(child.call("has_pending_push_work", False, parse=validation.truth) for child in self._children)
        self.supervisor.notice_isolations(self._clock)
        # Or the workers do not know yet of blocks that are held for a child that is being stopped.
        holds = any(self.supervisor.lifecycles[index].phase is not Phase.SERVING for index in self._held_for)
        return working or self.supervisor.needs_steps or holds

    @property
    def has_requests(self) -> bool:
        """Without one the engine may become idle with this step."""
        return bool(self._living)

    def record_gauges(self) -> None:
        """Puts what has changed since the last report into the children's tallies."""
        self.supervisor.record_gauges(self._outstanding)


def _blocks_of_others(loads: Iterable[Load], index: int) -> set[int]:
    """What loads of a child's siblings write."""
    return {block for load in loads if load.child != index for block in load.blocks}


def _check_unchanged(view: "KVConnectorOutput", shown: tuple[Any, Any], _answer: object) -> None:
    """``shown``: what the child was shown of saves and loads. Both sets are frozen."""
    if (view.finished_sending or None, view.finished_recving or None) != shown:
        raise TypeError("it changed the reports of the step, which are its siblings' too")
