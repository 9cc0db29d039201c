# SPDX-License-Identifier: Apache-2.0
"""MultiConnector: several KV connectors behind vLLM's interface for one.

How the children's answers become one (``tests/multi_connector/test_interface.py`` checks that no hook is missing):

| hook | children asked | merged by |
| --- | --- | --- |
| get_num_new_matched_tokens | all, in the same call | highest tokens x load_weight, first of equals (selection.py) |
| update_state_after_alloc | all | the chosen one gets the tokens, the others the real blocks and 0 |
| get_loaded_kv_cache_group_ids, get_external_cache_hit_sources | the chosen one | its answer |
| request.shared_prefix_boundary | all, each from the scheduler's value | selection.merge_junctions |
| build_connector_meta, build_connector_worker_meta | all | one part each |
| get_handshake_metadata, set_xfer_handshake_metadata(_pp_aware) | all | one part each; each gets back its own |
| bind/clear_connector_metadata, start_load_kv, wait_for_layer_load, save_kv_layer, wait_for_save, \
finish_forward, reset_capture_state, handle_preemptions, on_new_request, register_kv_caches, \
set_host_xfer_buffer_ops, bind_kv_cache_manager, bind_gpu_block_pool, shutdown | all | nothing to merge |
| get_transfer_results, get_finished | all | load: the chosen child's report; save: all who promised (completion.py) |
| get_block_ids_with_load_errors | all | union; with several KV cache groups the child's open loads fail instead |
| request_finished, request_finished_all_groups | all | True if any; parameters joined, first of equal keys |
| register_finished_partial_tail | all | any; counts as one promise with request_finished |
| update_connector_output | all | each sees its own part, its own loads and saves |
| take_events | all | one after the other |
| get_kv_connector_kv_cache_events | all | kept per child, added up per child |
| get_kv_connector_stats, build_kv_connector_stats, build_prom_metrics | all | by configured name (stats.py) |
| has_pending_push_work, has_pending_block_frees, requires_kv_delivery, requires_piecewise_for_cudagraph | all | any |
| supports_divergent_local_hybrid_hits | all | only if every child does |
| reset_cache | all | False if one says False or raises |
| get_mem_pool_context | all | at most one may have one, else a refusal |
| get_required_kvcache_layout | all | must agree, else a refusal |
| get_finished_count | all | None if one says None; must agree, else a refusal |
| kv_load_failure_policy | all | "recompute" if a child's is once it is built |

A child out of service (isolation.py) is not asked, and nothing waits for it.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector.completion import Completions, Ledger, Load, saves_of
from vllm_overlay.multi_connector.isolation import Child, at_start
from vllm_overlay.multi_connector.metadata import (
    MultiHandshakeMetadata,
    MultiKVEvents,
    MultiMetadata,
    MultiWorkerMetadata,
)
from vllm_overlay.multi_connector.selection import Offer, decide, merge_junctions, valid_tokens
from vllm_overlay.multi_connector.settings import ChildSpec, child_specs, multi_settings
from vllm_overlay.multi_connector.stats import Counters, MultiPromMetrics, MultiStats
from vllm_overlay.startup import prepare_process

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")


@dataclasses.dataclass(slots=True)
class _Answer:
    """One child's answer to one lookup."""

    offer: Offer
    asynchronous: bool = False
    junction: object = None


@dataclasses.dataclass(slots=True)
class _Lookup:
    """The latest decision for a request, until it is finished."""

    answers: list[_Answer]
    chosen: int | None
    asked_tokens: int
    counted: bool = False


class MultiConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc, unused-ignore]
    """The best offer loads, every child stores. See the module's table and ``settings.py``."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Builds every child in every process. Raises ConfigError, or RuntimeError naming the child that failed."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        prepare_process()
        self._settings = multi_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        specs = _specs_of(vllm_config)
        _check_hybrid_support(vllm_config, specs)
        self._children = _build_children(specs, vllm_config, role, kv_cache_config)
        self._adopt_load_failure_policy(specs)
        groups = kv_cache_config.kv_cache_groups
        # vLLM rewinds a hit of the whole prompt by one token, which a recurrent state cannot follow.
        self._has_recurrent_groups = any(
            isinstance(spec, MambaSpec) for group in groups for spec in iter_layer_specs(group.kv_cache_spec)
        )
        self._clock: Callable[[], float] = time.monotonic

        # Scheduler side. Tables of requests; each entry goes when its request finishes or, where said, is reported.
        self._lookups: dict[str, _Lookup] = {}
        self._waiting_since: dict[str, float] = {}
        self._failed_attempts: dict[str, dict[int, int]] = {}
        self._partial_tails: dict[str, set[int]] = {}
        self._new_loads: dict[str, Load] = {}
        self._new_saves: dict[str, frozenset[int]] = {}
        self._ledger = Ledger()
        self._announced: frozenset[int] = frozenset()

        # Worker side.
        self._completions = Completions(block_errors_name_requests=len(groups) <= 1)
        self._scheduler_isolated: frozenset[int] = frozenset()
        self._load_errors: set[int] = set()

    def _adopt_load_failure_policy(self, specs: list[ChildSpec]) -> None:
        # The scheduler reads the policy of the configuration it gave us, right after this constructor.
        config = self._kv_transfer_config
        wanting = [spec.name for spec in specs if spec.kv_transfer_config.kv_load_failure_policy == "recompute"]
        if wanting and config.kv_load_failure_policy != "recompute":
            config.kv_load_failure_policy = "recompute"
            if self.role == KVConnectorRole.SCHEDULER:
                logger.info("kv_load_failure_policy is now 'recompute' for all children, because %s set it.", wanting)

    @property
    def sub_connectors(self) -> list[Any]:
        """The children themselves, in configured order."""
        return [child.connector for child in self._children]

    # ---- Class level: asked of the class before any instance exists.

    @classmethod
    def all_children_support_hma(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """Whether the hybrid KV cache manager may stay on. For the name MultiConnector vLLM asks its own class."""
        return all(issubclass(spec.cls, SupportsHMA) for spec in _specs_of_transfer_config(kv_transfer_config))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return any(
            spec.cls.requires_piecewise_for_cudagraph(spec.kv_transfer_config.kv_connector_extra_config)
            for spec in child_specs(extra_config, kv_role="kv_both", engine_id=None)
        )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        layouts: dict[str, str] = {}
        for spec in _specs_of(vllm_config):
            layout = spec.cls.get_required_kvcache_layout(spec.vllm_config(vllm_config))
            if layout is not None:
                layouts[spec.name] = layout
        if len(set(layouts.values())) > 1:
            raise ConfigError(f"connectors of the MultiConnector need different KV cache layouts: {_words(layouts)}")
        return next(iter(layouts.values()), None)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MultiStats:
        return MultiStats.from_wire(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiPromMetrics:
        children = [(spec.name, spec.cls, spec.vllm_config(vllm_config)) for spec in _specs_of(vllm_config)]
        return MultiPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, children)

    # ---- Both sides.

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(child.read("supports_divergent_local_hybrid_hits", False) for child in self._children)

    @property
    def requires_kv_delivery(self) -> bool:
        # Read once, right after construction.
        return any(
            at_start(child.name, "requires_kv_delivery", partial(getattr, child.connector, "requires_kv_delivery"))
            for child in self._children
        )

    def get_kv_connector_stats(self) -> MultiStats | None:
        """Scheduler and workers; increments since the last call. None when there is nothing to say."""
        stats = MultiStats()
        for child in self._children:
            own = child.call("get_kv_connector_stats", None)
            counters, child.counters = child.counters, Counters()
            stats.aggregate(MultiStats.of(child.name, counters, own, child.connector))
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        for child in self._children:
            if not child.stopped and not child.stuck:
                child.stop()

    # ---- Worker side.

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        contexts = {child.name: child.start("get_mem_pool_context") for child in self._children}
        found = {name: context for name, context in contexts.items() if context is not None}
        if len(found) > 1:
            raise ConfigError(
                f"Multiple connectors provide a KV cache memory pool ({_words(found)}), and the cache can live in one "
                "only: configure it on one of them"
            )
        return next(iter(found.values()), None)

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        for child in self._children:
            child.start("register_kv_caches", kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        for child in self._children:
            child.start("set_host_xfer_buffer_ops", copy_operation)

    def get_handshake_metadata(self) -> MultiHandshakeMetadata | None:
        parts = tuple(child.start("get_handshake_metadata") for child in self._children)
        return MultiHandshakeMetadata(parts) if any(part is not None for part in parts) else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        for child, part in self._parts(kv_connector_metadata):
            if not child.wants_preempted_ids:
                child.call("handle_preemptions", None, part)
            elif kv_connector_metadata.preempted:
                child.call("handle_preemptions", None, set(kv_connector_metadata.preempted))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._scheduler_isolated = frozenset(connector_metadata.isolated)
        for index in connector_metadata.isolated:
            self._children[index].isolate("the scheduler process took it out of service")
        for request_id, load in connector_metadata.loads.items():
            if self._children[load.child].isolated:
                # Its part of this metadata reaches no hook of it, so nothing will write.
                self._completions.refuse_load(request_id, load)
            else:
                self._completions.expect_load(request_id, load)
        for request_id, holders in connector_metadata.saves.items():
            self._completions.expect_saves(request_id, holders)
        for child, part in self._parts(connector_metadata):
            child.call("bind_connector_metadata", None, part)

    def clear_connector_metadata(self) -> None:
        self._call_all("clear_connector_metadata")
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        for child in self._children:
            child.call("start_load_kv", None, forward_context, options=kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._call_all("wait_for_layer_load", layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        for child in self._children:
            child.call("save_kv_layer", None, layer_name, kv_layer, attn_metadata, options=kwargs)

    def finish_forward(self) -> None:
        self._call_all("finish_forward")

    def reset_capture_state(self) -> None:
        self._call_all("reset_capture_state")

    def wait_for_save(self) -> None:
        self._call_all("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """This rank's reports. Also where an isolated child is shut down and what it owed is released."""
        for child in self._children:
            self._collect(child, finished_req_ids)
        for child in self._children:
            if child.isolated:
                child.stop()
            if child.stopped:
                self._completions.abandon(child.index)
        done = self._completions.take()
        self._load_errors |= done.invalid_blocks
        return KVConnectorTransferResults(
            finished_sending=done.sent, finished_recving=done.received, failed_recving=done.failed
        )

    def _collect(self, child: Child, finished_req_ids: set[str]) -> None:
        results = child.call("get_transfer_results", None, finished_req_ids, parse=_transfer_results)
        if results is None:
            return
        # Asked now rather than when vLLM asks us: a load must not be reported good before its errors are known.
        blocks = child.call("get_block_ids_with_load_errors", None, parse=set)
        received, failed = results.finished_recving, results.failed_recving
        if blocks is None:
            # It raised: any of these may have failed.
            failed = failed | received
        ignored = self._completions.received(child.index, received, failed)
        self._completions.load_errors(child.index, blocks or (), received)
        ignored += self._completions.sent(child.index, results.finished_sending)
        child.counters.ignored_reports += ignored

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """What the last ``get_transfer_results`` found, which vLLM calls just before in every step."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def get_kv_connector_kv_cache_events(self) -> MultiKVEvents | None:
        found = {child.index: child.call("get_kv_connector_kv_cache_events", None) for child in self._children}
        events = {index: own for index, own in found.items() if own is not None}
        return MultiKVEvents(events) if events else None

    def build_connector_worker_meta(self) -> MultiWorkerMetadata | None:
        parts = tuple(child.call("build_connector_worker_meta", None) for child in self._children)
        isolated = frozenset(child.index for child in self._children if child.isolated) - self._scheduler_isolated
        if not isolated and all(part is None for part in parts):
            return None
        return MultiWorkerMetadata(parts, isolated)

    # ---- Scheduler side.

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        self._kv_cache_manager = kv_cache_manager
        for child in self._children:
            child.start("bind_kv_cache_manager", kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        for child in self._children:
            child.start("bind_gpu_block_pool", gpu_block_pool)

    def get_finished_count(self) -> int | None:
        counts = {child.name: child.start("get_finished_count") for child in self._children}
        if None in counts.values():
            return None
        if len(set(counts.values())) > 1:
            raise ConfigError(
                f"connectors of the MultiConnector expect different numbers of completion reports: {_words(counts)}"
            )
        count: int = next(iter(counts.values()))
        return count

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        for child in self._children:
            child.start("set_xfer_handshake_metadata", _own_handshake(metadata, child.index))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for child in self._children:
            child.start("set_xfer_handshake_metadata_pp_aware", _own_handshake(metadata, child.index))

    def on_new_request(self, request: "Request") -> None:
        self._call_all("on_new_request", request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Asks every child, and waits for those still looking only while one of them could win, up to the deadline."""
        asked = request.num_tokens - num_computed_tokens
        ceiling = max(asked - 1 if self._has_recurrent_groups else asked, 0)
        junction = request.shared_prefix_boundary
        answers: list[_Answer] = []
        for child in self._children:
            request.shared_prefix_boundary = junction
            answers.append(self._ask(child, request, num_computed_tokens, ceiling))
        request.shared_prefix_boundary = junction

        offers = [answer.offer for answer in answers]
        verdict = decide(offers, ceiling, may_wait=self._may_wait(request.request_id, offers))
        if verdict.wait:
            return None, False
        chosen = answers[verdict.chosen] if verdict.chosen is not None else _Answer(Offer(0, 0.0))
        tokens = chosen.offer.tokens or 0
        request.shared_prefix_boundary = merge_junctions(
            junction, [answer.junction for answer in answers], num_computed_tokens + tokens, request.num_tokens
        )
        self._lookups[request.request_id] = _Lookup(answers, verdict.chosen, asked)
        return tokens, chosen.asynchronous

    def _ask(self, child: Child, request: "Request", num_computed_tokens: int, ceiling: int) -> _Answer:
        def parse(answer: Any) -> tuple[object, bool]:
            tokens, asynchronous = answer
            return tokens, bool(asynchronous)

        neutral = _Answer(Offer(0, child.weight))
        reply = child.call("get_num_new_matched_tokens", None, request, num_computed_tokens, parse=parse)
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
        attempts = self._failed_attempts.get(request.request_id, {}).get(child.index, 0)
        if attempts >= self._settings.max_load_attempts:
            tokens = 0
        return _Answer(Offer(tokens, child.weight), asynchronous, junction)

    def _may_wait(self, request_id: str, offers: list[Offer]) -> bool:
        """Whether the deadline is still ahead. It runs from the request's first None until it is admitted."""
        if all(offer.tokens is not None for offer in offers):
            return True
        now = self._clock()
        return now - self._waiting_since.setdefault(request_id, now) < self._settings.lookup_timeout_ms / 1000

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        if (child := self._chosen(request)) is None:
            return tuple(self._kv_cache_config.prefix_cacheable_group_ids)
        # After an exception: none, so that vLLM zeroes all blocks, which a load overwrites anyway.
        return child.call("get_loaded_kv_cache_group_ids", (), request)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[CacheHitSource, int]:
        unspecified = {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens} if num_external_tokens else {}
        if (child := self._chosen(request)) is None:
            return unspecified
        return child.call("get_external_cache_hit_sources", unspecified, request, num_external_tokens)

    def _chosen(self, request: "Request") -> Child | None:
        lookup = self._lookups.get(request.request_id)
        return None if lookup is None or lookup.chosen is None else self._children[lookup.chosen]

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        chosen = self._chosen(request)
        for child in self._children:
            child.call("update_state_after_alloc", None, request, blocks, num_external_tokens if child is chosen else 0)
        self._count_lookup(request.request_id, num_external_tokens)
        if chosen is None or num_external_tokens <= 0:
            return
        lookup = self._lookups[request.request_id]
        assert lookup.chosen is not None
        # If the child has just raised it is isolated, its part of the metadata is never sent, and the workers refuse
        # this load, so the request is told that it failed.
        if lookup.answers[lookup.chosen].asynchronous:
            self._new_loads[request.request_id] = Load(chosen.index)
            self._ledger.load_started(request.request_id, chosen.index, num_external_tokens, self._clock())
        else:
            self._new_loads[request.request_id] = Load(chosen.index, tuple(blocks.get_block_ids()[0]))
            chosen.counters.loaded_tokens += num_external_tokens

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
            if waited is not None and answer.offer.tokens is None:
                counters.lookup_wait_seconds += self._clock() - waited

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> MultiMetadata:
        parts = tuple(child.call("build_connector_meta", None, scheduler_output) for child in self._children)
        isolated = tuple(child.index for child in self._children if child.isolated)
        preempted: frozenset[str] = frozenset()
        if any(child.wants_preempted_ids for child in self._children):
            preempted = frozenset(scheduler_output.preempted_req_ids or ())
        metadata = MultiMetadata(parts, self._new_loads, saves_of(self._new_saves), isolated, preempted)
        self._new_loads, self._new_saves = {}, {}
        self._announced = frozenset(isolated)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Gives each child its own view, and keeps from vLLM the reports it would assert on."""
        received = connector_output.finished_recving or set()
        sent = connector_output.finished_sending or set()
        failed = connector_output.failed_recving or set()
        news = connector_output.kv_connector_worker_meta
        events = connector_output.kv_cache_events
        if isinstance(news, MultiWorkerMetadata):
            for index in sorted(news.isolated):
                self._children[index].isolate("a worker process took it out of service")
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
        self._settle(connector_output, received, sent, failed)

    def _settle(
        self, connector_output: KVConnectorOutput, received: set[str], sent: set[str], failed: set[str]
    ) -> None:
        may_receive, may_send, ended = self._ledger.settle(received, sent, failed, self._clock())
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

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Not called by vLLM 0.32 on a connector with hybrid support; the same as for all groups with one."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        holders = self._partial_tails.pop(request.request_id, set())
        parameters: dict[str, Any] = {}
        for child in self._children:
            if isinstance(child.connector, SupportsHMA):
                answer = child.call("request_finished_all_groups", None, request, block_ids, parse=_finished_answer)
            else:
                answer = child.call("request_finished", None, request, block_ids[0], parse=_finished_answer)
            if answer is None:
                # Out of service: until the workers are told, a save it has begun may still read these blocks.
                holds, own = child.index not in self._announced, None
            else:
                holds, own = answer
            if holds:
                holders.add(child.index)
            if own and (clashes := sorted(set(own) & set(parameters))):
                child.log_once("parameters", "returned kv_transfer_params %s that another has set; dropped.", clashes)
            parameters = {**(own or {}), **parameters}
        self._forget(request.request_id)
        if holders:
            self._new_saves[request.request_id] = frozenset(holders)
            self._ledger.hold(request.request_id, frozenset(holders))
        return bool(holders), parameters or None

    def _forget(self, request_id: str) -> None:
        for table in (self._lookups, self._waiting_since, self._failed_attempts):
            table.pop(request_id, None)

    def register_finished_partial_tail(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Called just before ``request_finished_all_groups``; a child that says True in either owes one report."""
        holders = {
            child.index
            for child in self._children
            if child.call("register_finished_partial_tail", False, request, block_ids, partial_tail_offloads)
        }
        if holders:
            self._partial_tails[request.request_id] = holders
        return bool(holders)

    def take_events(self) -> "Iterable[KVCacheEvent]":
        events: list[KVCacheEvent] = []
        for child in self._children:
            # A child's may be a generator: it runs inside the fence.
            events += child.call("take_events", [], parse=_listed)
        return events

    def has_pending_block_frees(self) -> bool:
        return any(child.call("has_pending_block_frees", False) for child in self._children)

    def has_pending_push_work(self) -> bool:
        return any(child.call("has_pending_push_work", False) for child in self._children)

    def reset_cache(self) -> bool:
        answers = [child.call("reset_cache", False) for child in self._children if not child.isolated]
        return all(answer is not False for answer in answers)

    # ---- Helpers.

    def _call_all(self, hook: str, *args: Any) -> None:
        for child in self._children:
            child.call(hook, None, *args)

    def _parts(self, metadata: KVConnectorMetadata) -> Iterator[tuple[Child, KVConnectorMetadata | None]]:
        """Children in service with their part of the scheduler's metadata."""
        assert isinstance(metadata, MultiMetadata)
        for child, part in zip(self._children, metadata.children, strict=True):
            if child.index not in metadata.isolated:
                yield child, part


def _specs_of_transfer_config(config: "KVTransferConfig") -> list[ChildSpec]:
    return child_specs(
        config.kv_connector_extra_config, config.kv_role, config.engine_id, config.kv_load_failure_policy
    )


def _specs_of(vllm_config: "VllmConfig") -> list[ChildSpec]:
    return _specs_of_transfer_config(vllm_config.kv_transfer_config)


def _check_hybrid_support(vllm_config: "VllmConfig", specs: list[ChildSpec]) -> None:
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return
    for spec in specs:
        if not issubclass(spec.cls, SupportsHMA):
            raise ConfigError(
                f"connector {spec.name!r} of the MultiConnector ({spec.cls.__name__}) does not support the hybrid KV "
                "cache manager, which is on: remove the connector or set --disable-hybrid-kv-cache-manager"
            )


def _build_children(
    specs: list[ChildSpec], vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
) -> list[Child]:
    """All of them or none: when one cannot be built, those before it are shut down again."""
    children: list[Child] = []
    with contextlib.ExitStack() as built:
        for index, spec in enumerate(specs):
            own_config = spec.vllm_config(vllm_config)
            build: Callable[..., Any] = spec.cls
            connector = at_start(spec.name, "__init__", partial(build, own_config, role, kv_cache_config))
            child = Child(index, spec.name, spec.weight, connector)
            built.callback(child.stop)
            children.append(child)
        built.pop_all()
    return children


def _transfer_results(answer: Any) -> KVConnectorTransferResults:
    return KVConnectorTransferResults(
        finished_sending=set(answer.finished_sending or ()),
        finished_recving=set(answer.finished_recving or ()),
        failed_recving=set(answer.failed_recving or ()),
    )


def _finished_answer(answer: Any) -> tuple[bool, dict[str, Any] | None]:
    holds, parameters = answer
    return bool(holds), None if parameters is None else dict(parameters)


def _listed(events: "Iterable[KVCacheEvent] | None") -> "list[KVCacheEvent]":
    return list(events or ())


def _own_handshake(metadata: Mapping[Any, KVConnectorHandshakeMetadata], index: int) -> dict[Any, Any]:
    """One child's part of every rank's handshake metadata; empty, as vLLM gives it to a child alone, if it has none."""
    return {rank: part.children[index] for rank, part in metadata.items() if part.children[index] is not None}


def _words(by_name: Mapping[str, object]) -> str:
    return ", ".join(f"{name} ({value})" if isinstance(value, str | int) else name for name, value in by_name.items())
