# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half of the MultiConnector: who loads, who sees which request, who is in service."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_overlay.common.backoff import Backoff
from vllm_overlay.multi_connector import validation
from vllm_overlay.multi_connector.child import Child
from vllm_overlay.multi_connector.completion import Ledger, Load, saves_of
from vllm_overlay.multi_connector.control_file import ControlFile
from vllm_overlay.multi_connector.cost_model import Prices
from vllm_overlay.multi_connector.lifecycle import Duty, Lifecycle, Phase
from vllm_overlay.multi_connector.metadata import MultiKVEvents, MultiMetadata, MultiWorkerMetadata
from vllm_overlay.multi_connector.request_filter import RequestFilter
from vllm_overlay.multi_connector.selection import Offer, decide, merge_junctions, valid_tokens
from vllm_overlay.multi_connector.settings import ChildSettings, MultiSettings

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")


@dataclasses.dataclass(slots=True)
class Answer:
    """One child's answer to one lookup."""

    offer: Offer
    asynchronous: bool = False
    junction: object = None


@dataclasses.dataclass(slots=True)
class Lookup:
    """The latest decision for a request, until it is finished."""

    answers: list[Answer]
    chosen: int | None
    asked_tokens: int
    counted: bool = False


class SchedulerSide:
    """Every method is called from the scheduler's thread; those with the name of a hook, by that hook."""

    def __init__(
        self,
        children: Sequence[Child],
        settings: MultiSettings,
        child_settings: Mapping[str, ChildSettings],
        has_recurrent_groups: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``has_recurrent_groups``: a hit of a whole prompt cannot be used, as a state cannot be rewound by a token."""
        self._children = children
        self._settings = settings
        self._has_recurrent_groups = has_recurrent_groups
        self._clock = clock
        self._control = ControlFile(settings.control_file, child_settings)
        self._lifecycles = [Lifecycle(Backoff(settings.retry_first_s, settings.retry_longest_s)) for _ in children]
        self._filters = [RequestFilter() for _ in children]
        self._told_gauges: list[dict[str, float]] = [{"state": 0.0, "quarantined_requests": 0.0} for _ in children]
        self._prices = Prices([child_settings[child.name].load_weight for child in children])
        self._steps_under_way: deque[tuple[float, int]] = deque(maxlen=8)
        self._last_output = 0.0
        self._kv_cache_manager: KVCacheManager | None = None

        # Tables of requests; each entry goes when its request finishes or, where said, is reported.
        self._living: set[str] = set()
        self._admitted: set[str] = set()
        self._lookups: dict[str, Lookup] = {}
        self._waiting_since: dict[str, float] = {}
        self._failed_attempts: dict[str, dict[int, int]] = {}
        self._partial_tails: dict[str, set[int]] = {}
        self._new_loads: dict[str, Load] = {}
        self._new_saves: dict[str, frozenset[int]] = {}
        self._new_strangers: dict[int, frozenset[str]] = {}
        self._ledger = Ledger()

    # ---- Start.

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        self._kv_cache_manager = kv_cache_manager
        for child in self._children:
            child.start("bind_kv_cache_manager", kv_cache_manager)

    def set_handshake(self, hook: str, metadata: Mapping[Any, KVConnectorHandshakeMetadata]) -> None:
        """Gives each child its own part of every rank's."""
        for child in self._children:
            child.start(hook, _own_handshake(metadata, child.index))

    # ---- A request's way.

    def on_new_request(self, request: "Request") -> None:
        self._living.add(request.request_id)
        for child, sight in zip(self._children, self._filters, strict=True):
            if child.in_service:
                child.call("on_new_request", None, request)
            else:
                sight.add_stranger(request.request_id)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Asks every child, and waits for those still looking only while one of them could win, up to the deadline."""
        self._control.look(self._clock())
        self._living.add(request.request_id)
        asked = request.num_tokens - num_computed_tokens
        ceiling = max(asked - 1 if self._has_recurrent_groups else asked, 0)
        junction = request.shared_prefix_boundary
        found: list[Answer] = []
        for child in self._children:
            request.shared_prefix_boundary = junction
            found.append(self._ask(child, request, num_computed_tokens, ceiling))
        request.shared_prefix_boundary = junction

        offers = [answer.offer for answer in found]
        verdict = decide(offers, ceiling, may_wait=self._may_wait(request.request_id, offers))
        if verdict.wait:
            return None, False
        chosen = found[verdict.chosen] if verdict.chosen is not None else Answer(Offer(0, 0.0))
        tokens = chosen.offer.tokens or 0
        request.shared_prefix_boundary = merge_junctions(
            junction, [answer.junction for answer in found], num_computed_tokens + tokens, request.num_tokens
        )
        self._lookups[request.request_id] = Lookup(found, verdict.chosen, asked)
        return tokens, chosen.asynchronous

    def _ask(self, child: Child, request: "Request", num_computed_tokens: int, ceiling: int) -> Answer:
        settings = self._control.settings[child.name]
        neutral = Answer(Offer(0, settings.load_weight))
        if not self._filters[child.index].knows(request.request_id):
            return neutral
        reply = child.call("get_num_new_matched_tokens", None, request, num_computed_tokens, parse=validation.lookup)
        if reply is None:
            return neutral
        junction = request.shared_prefix_boundary
        answer, asynchronous = reply
        tokens = None if answer is None else valid_tokens(answer, ceiling)
        if answer is not None and tokens is None:
            child.counters.invalid_answers += 1
            child.log_once(
                "answer", "offered %r tokens where 0 to %d are possible; taken as 0, and counted.", answer, ceiling
            )
            return neutral
        if not self._may_load(child, request.request_id) or (tokens is not None and tokens < settings.min_tokens):
            tokens = 0
        value = self._prices.value_of(child.index) if self._settings.selection == "cost" else None
        return Answer(Offer(tokens, settings.load_weight, value), asynchronous, junction)

    def _may_load(self, child: Child, request_id: str) -> bool:
        attempts = self._failed_attempts.get(request_id, {}).get(child.index, 0)
        return (
            self._control.settings[child.name].load
            and self._filters[child.index].works_on(request_id)
            and attempts < self._settings.max_load_attempts
        )

    def _may_wait(self, request_id: str, offers: list[Offer]) -> bool:
        """Whether the deadline is still ahead. It runs from the request's first None until it is admitted."""
        if all(offer.tokens is not None for offer in offers):
            return True
        now = self._clock()
        return now - self._waiting_since.setdefault(request_id, now) < self._settings.lookup_timeout_ms / 1000

    def get_loaded_kv_cache_group_ids(self, request: "Request", by_default: tuple[int, ...]) -> tuple[int, ...]:
        if (child := self.chosen(request.request_id)) is None:
            return by_default
        # After an exception: none, so that vLLM zeroes all blocks, which a load overwrites anyway.
        return child.call("get_loaded_kv_cache_group_ids", (), request, parse=validation.integers)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        unspecified = {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens} if num_external_tokens else {}
        if (child := self.chosen(request.request_id)) is None:
            return unspecified
        return child.call(
            "get_external_cache_hit_sources", unspecified, request, num_external_tokens, parse=validation.hit_sources
        )

    def chosen(self, request_id: str) -> Child | None:
        """Who was decided for at the latest lookup."""
        lookup = self._lookups.get(request_id)
        return None if lookup is None or lookup.chosen is None else self._children[lookup.chosen]

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        request_id = request.request_id
        loader = self.chosen(request_id) if num_external_tokens > 0 else None
        self._decide_who_works(request_id, loader)
        for child, sight in zip(self._children, self._filters, strict=True):
            if sight.works_on(request_id):
                tokens = num_external_tokens if child is loader else 0
                child.call("update_state_after_alloc", None, request, blocks, tokens)
        self._count_lookup(request_id, num_external_tokens)
        if loader is None:
            return
        # If the child has just raised it is isolated, its part of the metadata is never sent, and the workers refuse
        # this load, so the request is told that it failed.
        if self._lookups[request_id].answers[loader.index].asynchronous:
            self._new_loads[request_id] = Load(loader.index)
            self._ledger.load_started(request_id, loader.index, num_external_tokens, self._clock())
        else:
            self._new_loads[request_id] = Load(loader.index, tuple(blocks.get_block_ids()[0]))
            loader.counters.loaded_tokens += num_external_tokens

    def _decide_who_works(self, request_id: str, loader: Child | None) -> None:
        """At a request's first admission: children that must not store it get no more of it than they need to load."""
        if request_id in self._admitted:
            return
        self._admitted.add(request_id)
        for child, sight in zip(self._children, self._filters, strict=True):
            settings = self._control.settings[child.name]
            if child is loader:
                if not settings.store:
                    sight.give_no_work_after_this_step(request_id)
            elif not settings.store or (loader is not None and not settings.promote):
                sight.give_no_work(request_id)

    def _count_lookup(self, request_id: str, num_external_tokens: int) -> None:
        """Once per decision, at admission, as vLLM counts: a lookup repeated for want of blocks is not counted."""
        waited = self._waiting_since.pop(request_id, None)
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.counted:
            return
        lookup.counted = True
        for child, answer in zip(self._children, lookup.answers, strict=True):
            counters = child.counters
            offered = answer.offer.tokens or 0
            counters.queries += 1
            counters.asked_tokens += lookup.asked_tokens
            counters.offered_tokens += offered
            if child.index == lookup.chosen:
                counters.chosen += num_external_tokens > 0
            elif offered and lookup.chosen is not None:
                counters.outbid += 1
            elif offered and answer.offer.value is not None:
                counters.too_slow += 1
                self._prices.loads[child.index].lost_to_computing()
            if waited is not None and answer.offer.tokens is None:
                counters.lookup_wait_seconds += self._clock() - waited

    def register_finished_partial_tail(
        self, request: "Request", block_ids: tuple[list[int], ...], partial_tail_offloads: list[tuple[int, int, int]]
    ) -> bool:
        """Called just before ``request_finished_all_groups``; a child that says True in either owes one report."""
        holders = set()
        for child, sight in zip(self._children, self._filters, strict=True):
            if sight.works_on(request.request_id) and child.call(
                "register_finished_partial_tail",
                False,
                request,
                block_ids,
                partial_tail_offloads,
                parse=validation.truth,
            ):
                holders.add(child.index)
        if holders:
            self._partial_tails[request.request_id] = holders
        return bool(holders)

    def request_finished(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """For all groups; a child without hybrid support is told of the only one."""
        request_id = request.request_id
        holders = self._partial_tails.pop(request_id, set())
        parameters: dict[str, Any] = {}
        for child, sight in zip(self._children, self._filters, strict=True):
            if not sight.knows(request_id):
                continue
            works = sight.works_on(request_id)
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
                child.log_once("parameters", "returned kv_transfer_params %s that another has set; dropped.", clashes)
            parameters = {**(own or {}), **parameters}
        self._forget(request_id)
        if holders:
            self._new_saves[request_id] = frozenset(holders)
            self._ledger.hold(request_id, frozenset(holders))
        return bool(holders), parameters or None

    def _may_still_read(self, child: Child) -> bool:
        self._notice_isolations()
        return self._lifecycles[child.index].phase is Phase.STOPPING

    def _forget(self, request_id: str) -> None:
        for table in (self._lookups, self._waiting_since, self._failed_attempts):
            table.pop(request_id, None)
        self._living.discard(request_id)
        self._admitted.discard(request_id)
        for sight in self._filters:
            sight.finished(request_id)

    @property
    def tracked(self) -> int:
        """Entries in all tables of requests."""
        tables = (
            *(self._living, self._admitted, self._lookups, self._waiting_since, self._failed_attempts),
            *(self._partial_tails, self._new_loads, self._new_saves, self._new_strangers),
        )
        return sum(map(len, tables)) + self._ledger.open_requests + sum(sight.tracked for sight in self._filters)

    # ---- A step's way.

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> MultiMetadata:
        now = self._clock()
        self._control.look(now)
        self._end_overdue_loads(now)
        parts = tuple(self._part(child, scheduler_output) for child in self._children)
        self._notice_isolations()
        self._try_again(now)
        preempted: frozenset[str] = frozenset()
        if any(child.wants_preempted_ids for child in self._children):
            preempted = frozenset(scheduler_output.preempted_req_ids or ())
        orders = tuple(service.order for service in self._lifecycles)
        for service in self._lifecycles:
            service.told = True
        metadata = MultiMetadata(
            parts, self._new_loads, saves_of(self._new_saves), orders, self._new_strangers, preempted
        )
        self._new_loads, self._new_saves, self._new_strangers = {}, {}, {}
        if self._settings.selection == "cost":
            self._note_step(scheduler_output, now)
        return metadata

    def _part(self, child: Child, output: "SchedulerOutput") -> KVConnectorMetadata | None:
        sight = self._filters[child.index]
        view = sight.view(output) if child.in_service else output
        part = child.call("build_connector_meta", None, view, parse=validation.optional(KVConnectorMetadata))
        if view is not output:
            # The one field of it that the interface lets a connector change.
            output.new_block_ids_to_zero = view.new_block_ids_to_zero
        sight.step_is_planned()
        return part

    def _note_step(self, output: "SchedulerOutput", now: float) -> None:
        """Remembers a step that computes, to measure it; one that mostly decodes says nothing of prefill."""
        tokens = output.total_num_scheduled_tokens
        if tokens:
            is_prefill = tokens > 2 * len(output.num_scheduled_tokens)
            self._steps_under_way.append((now, tokens if is_prefill else 0))

    def _measure_step(self, now: float) -> None:
        if not self._steps_under_way:
            return
        started, tokens = self._steps_under_way.popleft()
        if tokens:
            # Steps overlap with asynchronous scheduling: the later of both beginnings.
            self._prices.step_took(tokens, now - max(started, self._last_output))
        self._last_output = now

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Gives each child its own view, and keeps from vLLM the reports it would assert on."""
        now = self._clock()
        if self._settings.selection == "cost":
            self._measure_step(now)
        received = connector_output.finished_recving or set()
        sent = connector_output.finished_sending or set()
        failed = connector_output.failed_recving or set()
        news = connector_output.kv_connector_worker_meta
        events = connector_output.kv_cache_events
        for child in self._children:
            mine = {request_id for request_id in received if self._ledger.loader_of(request_id) == child.index}
            view = dataclasses.replace(
                connector_output,
                finished_recving=mine or None,
                failed_recving=failed & mine,
                finished_sending={r for r in sent if child.index in self._ledger.holders_of(r)} or None,
                kv_connector_worker_meta=news.children[child.index] if isinstance(news, MultiWorkerMetadata) else None,
                kv_cache_events=events.children.get(child.index) if isinstance(events, MultiKVEvents) else None,
                kv_connector_stats=None,
            )
            child.call("update_connector_output", None, view)
        self._settle(connector_output, received, sent, failed, now)
        if isinstance(news, MultiWorkerMetadata):
            self._hear(news, now)

    def _settle(
        self, connector_output: "KVConnectorOutput", received: set[str], sent: set[str], failed: set[str], now: float
    ) -> None:
        may_receive, may_send, ended = self._ledger.settle(received, sent, failed, now)
        connector_output.finished_recving = may_receive or None
        connector_output.finished_sending = may_send or None
        for load in ended:
            counters = self._children[load.child].counters
            if load.failed:
                counters.failed_loads += 1
                if load.request_id in self._lookups:
                    attempts = self._failed_attempts.setdefault(load.request_id, {})
                    attempts[load.child] = attempts.get(load.child, 0) + 1
            else:
                counters.loaded_tokens += load.tokens
                counters.load_seconds += load.seconds
                self._prices.loads[load.child].measured(load.tokens, load.seconds)

    def take_events(self) -> "list[KVCacheEvent]":
        events: list[KVCacheEvent] = []
        for child in self._children:
            events += child.call("take_events", [], parse=validation.events)
        return events

    def has_pending_block_frees(self) -> bool:
        return any(child.call("has_pending_block_frees", False, parse=validation.truth) for child in self._children)

    def has_pending_push_work(self) -> bool:
        working = any(child.call("has_pending_push_work", False, parse=validation.truth) for child in self._children)
        self._notice_isolations()
        return working or any(service.needs_steps for service in self._lifecycles) or self._holds_for_the_stopped()

    def _holds_for_the_stopped(self) -> bool:
        """Whether blocks are held for a child that is being stopped, and the workers do not know of it yet."""
        holders = {index for children in self._new_saves.values() for index in children}
        return any(self._lifecycles[index].phase is not Phase.SERVING for index in holders)

    def reset_cache(self) -> bool:
        """A child out of service comes back empty anyway."""
        found = [child.call("reset_cache", False) for child in self._children if child.in_service]
        return all(answer is not False for answer in found)

    # ---- In and out of service.

    def _notice_isolations(self) -> None:
        """Children are isolated wherever they fail; this is where the other processes begin to hear of it."""
        for child, service in zip(self._children, self._lifecycles, strict=True):
            if child.isolated:
                service.isolate(self._clock())

    def _end_overdue_loads(self, now: float) -> None:
        if self._settings.load_timeout_s > 0:
            for index in self._ledger.overdue(now - self._settings.load_timeout_s):
                self._children[index].isolate("a load has been under way for longer than load_timeout_s")

    def _hear(self, news: MultiWorkerMetadata, now: float) -> None:
        """What the ranks say to the orders they have seen. An answer to an older order is none to the present one."""
        self._notice_isolations()
        for child, service, order in zip(self._children, self._lifecycles, news.orders, strict=False):
            if order != service.order:
                continue
            if child.index in news.broken:
                child.isolate("a worker process took it out of service")
            elif order.duty is Duty.STOP and child.index not in news.unstopped:
                service.stopped()
            elif order.duty is Duty.STAND_BY:
                self._admit(child, service, news.handshakes.get(child.index, {}), now)
        self._notice_isolations()

    def _try_again(self, now: float) -> None:
        """Puts a new instance of each child whose pause is over on trial.

        Not in a step that still tells the workers of blocks held for the old one: they would expect them of the new.
        """
        held_for = {index for children in self._new_saves.values() for index in children}
        for child, service in zip(self._children, self._lifecycles, strict=True):
            if not service.may_try(now) or child.index in held_for:
                continue
            child.stop()
            hooks = [] if self._kv_cache_manager is None else [("bind_kv_cache_manager", self._kv_cache_manager)]
            if child.renew(service.generation + 1, *hooks):
                service.begin_trial()
            else:
                service.trial_failed(now)

    def _admit(
        self,
        child: Child,
        service: Lifecycle,
        handshakes: Mapping[tuple[int, int], KVConnectorHandshakeMetadata],
        now: float,
    ) -> None:
        """All processes have a new instance of the child. It begins empty: it may have missed a reset."""
        child.standing_by = False
        child.call("set_xfer_handshake_metadata_pp_aware", None, dict(handshakes))
        child.call("reset_cache", None)
        if child.isolated:
            return
        self._filters[child.index].begin_anew(self._living)
        self._new_strangers[child.index] = frozenset(self._living)
        service.serve(now)
        child.counters.returns += 1
        logger.info("Connector %r is back in service, as instance %d.", child.name, service.generation)

    def record_gauges(self) -> None:
        """Puts what has changed since the last report into the children's counters."""
        for child, service, told in zip(self._children, self._lifecycles, self._told_gauges, strict=True):
            held = 0 if service.phase is Phase.SERVING else self._ledger.owed_by(child.index)
            gauges = {"state": float(service.phase.value), "quarantined_requests": float(held)}
            changed = {name: value for name, value in gauges.items() if told[name] != value}
            child.counters.gauges.update(changed)
            told.update(changed)


def _own_handshake(metadata: Mapping[Any, KVConnectorHandshakeMetadata], index: int) -> dict[Any, Any]:
    """One child's part of every rank's handshake metadata; empty, as vLLM gives it to a child alone, if it has none."""
    return {rank: part.children[index] for rank, part in metadata.items() if part.children[index] is not None}
