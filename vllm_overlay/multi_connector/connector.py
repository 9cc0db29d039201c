# SPDX-License-Identifier: Apache-2.0
"""MultiConnector: several KV connectors behind vLLM's interface for one.

How the children's answers become one (``tests/multi_connector/test_interface.py`` checks that no hook is missing):

| hook | children asked | merged by |
| --- | --- | --- |
| get_num_new_matched_tokens | all, in the same call | worth most, first of equals (choice.py) |
| update_state_after_alloc | all | the chosen one gets the tokens, the others the real blocks and 0 |
| get_loaded_kv_cache_group_ids, get_external_cache_hit_sources, completes_local_attention | the chosen one \
| its answer |
| request.shared_prefix_boundary | all, each from the scheduler's value | lookup.merge_junctions |
| build_connector_meta, build_connector_worker_meta | all | one part each; flags that a child sets are kept |
| get_handshake_metadata, set_xfer_handshake_metadata(_pp_aware) | all | one part each; each gets back its own |
| bind/clear_connector_metadata, start_load_kv, wait_for_layer_load, save_kv_layer, wait_for_save, \
finish_forward, reset_capture_state, handle_preemptions, on_new_request, register_kv_caches, \
set_host_xfer_buffer_ops, bind_kv_cache_manager, bind_gpu_block_pool, shutdown | all | nothing to merge |
| get_transfer_results, get_finished | all | load: the chosen child's report; save: all holders' (completion.py) |
| get_block_ids_with_load_errors | all | union; of each child what it was told to load |
| request_finished, request_finished_all_groups | all | True if any; parameters joined, first of equal keys |
| register_finished_partial_tail | all | any; counts as one promise with request_finished |
| update_connector_output | all | each sees its own part, its own saves and all loads, and changes nothing |
| take_events | all | one after the other |
| get_kv_connector_kv_cache_events | all | kept per child, added up per child |
| get_kv_connector_stats, build_kv_connector_stats, build_prom_metrics | all | by configured name (stats.py) |
| has_pending_push_work, has_pending_block_frees, requires_kv_delivery, requires_piecewise_for_cudagraph | all | any |
| supports_divergent_local_hybrid_hits | all | only if every child does |
| reset_cache | all | False if one says False or raises |
| get_mem_pool_context | all | at most one may have one, else a refusal |
| get_required_kvcache_layout | all | must agree, else a refusal |
| get_finished_count | all | None if one says None; must agree, else a refusal |
| kv_load_failure_policy | none | one for the engine, by what the operator wrote (children.py) |

"All" are those in service (lifecycle.py), and for hooks that concern one request those that see it
(request_filter.py). For a child out of service nothing waits but the blocks that it may still touch (worker.py).
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector import validation
from vllm_overlay.multi_connector.child import Child, at_start
from vllm_overlay.multi_connector.children import ChildSpec, announce, child_specs
from vllm_overlay.multi_connector.control_file import warn_of_missing_directory
from vllm_overlay.multi_connector.hooks import LAYER_HOOKS, Watchdog
from vllm_overlay.multi_connector.metadata import MultiMetadata
from vllm_overlay.multi_connector.prom_metrics import MultiPromMetrics
from vllm_overlay.multi_connector.scheduler import SchedulerSide
from vllm_overlay.multi_connector.settings import multi_settings
from vllm_overlay.multi_connector.stats import LoggedStats, MultiStats
from vllm_overlay.multi_connector.worker import WorkerSide
from vllm_overlay.named_child import QuietStep
from vllm_overlay.plugin import prepare_process
from vllm_overlay.tally import ReportTimes

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_STATS = validation.optional(KVConnectorStats)


def _call_all(hook: str) -> Callable[..., None]:
    """A hook that every child with work in this step gets as it is, and that answers nothing."""

    def call_all(self: "MultiConnector", *args: Any, **options: Any) -> None:
        for child in self._worker.working:
            child.call(hook, None, *args, **options)

    return call_all


def _by(half: str, hook: str) -> Any:
    """A hook that one half answers: from its second call on nothing of ours lies between."""
    return cached_property(attrgetter(f"{half}.{hook}"))


class MultiConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc, unused-ignore]
    """The child with the best offer loads, and every child stores. See the module's table and ``settings.py``.

    What takes thought is in ``scheduler.py`` and ``worker.py``; here each hook finds its way there.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Builds every child in every process. Raises ConfigError, or RuntimeError naming the child that failed."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        prepare_process()
        settings = multi_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if role == KVConnectorRole.SCHEDULER:
            warn_of_missing_directory(settings.control_file)
        specs = _specs_of(vllm_config.kv_transfer_config)
        _check_hybrid_support(vllm_config, specs)
        _check_loads(vllm_config, specs)
        self._report_times = ReportTimes()
        self._watchdog = Watchdog(settings.hang_after_s)
        self._children = self._build(specs)
        if role == KVConnectorRole.SCHEDULER:
            announce(settings, specs)
            # The scheduler reads the policy of the configuration it gave us, right after this constructor.
            # Workers do not read it; in their process it may be the same configuration, which then says what we wrote.
            self._kv_transfer_config.kv_load_failure_policy = specs[0].load_failure_policy.value
        groups = kv_cache_config.kv_cache_groups
        # vLLM rewinds a hit of the whole prompt by one token, which a recurrent state cannot follow.
        recurrent = any(
            isinstance(spec, MambaSpec) for group in groups for spec in iter_layer_specs(group.kv_cache_spec)
        )
        self._scheduler = SchedulerSide(self._children, settings, specs, recurrent)
        self._worker = WorkerSide(self._children, settings)

    def _build(self, specs: list[ChildSpec]) -> list[Child]:
        """All children or none: when one cannot be built, those before it are shut down again."""
        children: list[Child] = []
        with contextlib.ExitStack() as built:
            for index, spec in enumerate(specs):
                cls: Callable[..., Any] = spec.cls
                build = partial(cls, spec.vllm_config(self._vllm_config), self._role, self._kv_cache_config)
                child = Child(index, spec.name, at_start(spec.name, "__init__", build), build, self._watchdog)
                built.callback(child.stop)
                children.append(child)
            built.pop_all()
        return children

    @property
    def sub_connectors(self) -> list[Any]:
        """The children's present instances, in configured order."""
        return [child.connector for child in self._children]

    # ---- Class level: asked of the class before any instance exists.

    @classmethod
    def all_children_support_hma(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """Whether the hybrid KV cache manager may stay on. For the name MultiConnector vLLM asks its own class."""
        return all(issubclass(spec.cls, SupportsHMA) for spec in _specs_of(kv_transfer_config))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        def asked(spec: ChildSpec) -> bool:
            found = spec.cls.requires_piecewise_for_cudagraph(spec.kv_transfer_config.kv_connector_extra_config)
            return bool(found)

        specs = child_specs(extra_config, kv_role="kv_both", engine_id=None)
        return any(at_start(spec.name, "requires_piecewise_for_cudagraph", partial(asked, spec)) for spec in specs)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        layouts: dict[str, str] = {}
        for spec in _specs_of(vllm_config.kv_transfer_config):
            ask = partial(spec.cls.get_required_kvcache_layout, spec.vllm_config(vllm_config))
            layout = at_start(spec.name, "get_required_kvcache_layout", ask)
            if layout is not None:
                layouts[spec.name] = layout
        if len(set(layouts.values())) > 1:
            raise ConfigError(f"connectors of the MultiConnector need different KV cache layouts: {_words(layouts)}")
        return next(iter(layouts.values()), None)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LoggedStats:
        return LoggedStats.from_wire(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiPromMetrics:
        specs = _specs_of(vllm_config.kv_transfer_config)
        children = [(spec.name, spec.cls, spec.vllm_config(vllm_config)) for spec in specs]
        return MultiPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, children)

    # ---- Both sides.

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(
            child.call("supports_divergent_local_hybrid_hits", False, parse=validation.truth)
            for child in self._children
        )

    @property
    def requires_kv_delivery(self) -> bool:
        # Read once, right after construction.
        return any(child.start("requires_kv_delivery") for child in self._children)

    def get_kv_connector_stats(self) -> MultiStats | None:
        """Called in the scheduler and in workers. Increments since the last report, or None.

        Workers have little to report, and at once: an engine that becomes idle may not step again.
        """
        is_due = self._report_times.is_due()
        if not is_due and (self._scheduler.has_requests or self._worker.is_silent):
            return None
        self._scheduler.record_gauges()
        stats = MultiStats()
        for child in self._children:
            is_quiet = child in self._worker.quiet
            own = None if is_quiet else child.call("get_kv_connector_stats", None, parse=_STATS)
            tally = child.take_tally(with_hook_seconds=is_due)
            if own is not None or not tally.is_empty():
                stats.put(child.name, tally, own, child.connector)
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        for child in self._children:
            child.stop()
        self._watchdog.stop()

    # ---- Worker side: vLLM calls these on the thread that runs the model.

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        contexts = {child: child.start("get_mem_pool_context") for child in self._children}
        found = {child: context for child, context in contexts.items() if context is not None}
        if len(found) > 1:
            raise ConfigError(
                f"Multiple connectors provide a KV cache memory pool ({', '.join(child.name for child in found)}), and "
                "the cache can live in one only: configure it on one of them"
            )
        for child in found:
            child.keeps_memory = True
        return next(iter(found.values()), None)

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        self._start_all("register_kv_caches", kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        self._start_all("set_host_xfer_buffer_ops", copy_operation)

    def _start_all(self, hook: str, argument: Any) -> None:
        for child in self._children:
            child.start(hook, argument, again=True)

    get_handshake_metadata = _by("_worker", "get_handshake_metadata")
    handle_preemptions = _by("_worker", "handle_preemptions")
    get_transfer_results = _by("_worker", "get_transfer_results")
    get_block_ids_with_load_errors = _by("_worker", "get_block_ids_with_load_errors")
    get_kv_connector_kv_cache_events = _by("_worker", "get_kv_connector_kv_cache_events")
    build_connector_worker_meta = _by("_worker", "build_connector_worker_meta")

    def bind_connector_metadata(self, connector_metadata: MultiMetadata | QuietStep) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.bind_connector_metadata(connector_metadata)
        # vLLM asks this before it calls hooks of a layer. ``bool()`` is False, and takes no time for each layer.
        has_layer_hooks = any(not child.empty_hooks >= LAYER_HOOKS for child in self._worker.working)
        self.has_connector_metadata = super().has_connector_metadata if has_layer_hooks else bool

    def clear_connector_metadata(self) -> None:
        self._worker.clear_connector_metadata()
        super().clear_connector_metadata()

    start_load_kv = _call_all("start_load_kv")
    wait_for_layer_load = _call_all("wait_for_layer_load")
    save_kv_layer = _call_all("save_kv_layer")
    finish_forward = _call_all("finish_forward")
    reset_capture_state = _call_all("reset_capture_state")
    wait_for_save = _call_all("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    # ---- Scheduler side: vLLM calls these on the scheduler's thread.

    bind_kv_cache_manager = _by("_scheduler", "bind_kv_cache_manager")
    on_new_request = _by("_scheduler", "on_new_request")
    get_num_new_matched_tokens = _by("_scheduler", "get_num_new_matched_tokens")
    get_external_cache_hit_sources = _by("_scheduler", "get_external_cache_hit_sources")
    update_state_after_alloc = _by("_scheduler", "update_state_after_alloc")
    build_connector_meta = _by("_scheduler", "build_connector_meta")
    update_connector_output = _by("_scheduler", "update_connector_output")
    request_finished_all_groups = _by("_scheduler", "request_finished")
    register_finished_partial_tail = _by("_scheduler", "register_finished_partial_tail")
    has_pending_push_work = _by("_scheduler", "has_pending_push_work")

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
        self._scheduler.some_ranks_are_silent = True
        return count

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        self._scheduler.set_handshake("set_xfer_handshake_metadata", metadata)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.set_handshake("set_xfer_handshake_metadata_pp_aware", metadata)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        if (child := self._scheduler.lookups.chosen(request.request_id)) is None:
            return tuple(self._kv_cache_config.prefix_cacheable_group_ids)
        # After an exception: none, so that vLLM zeroes all blocks, which a load overwrites anyway.
        return child.call("get_loaded_kv_cache_group_ids", (), request, parse=validation.integers)

    def completes_local_attention(self, request: "Request") -> bool:
        child = self._scheduler.lookups.chosen(request.request_id)
        return child is not None and child.call("completes_local_attention", False, request, parse=validation.truth)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Not called by vLLM 0.32 on a connector with hybrid support; the same as for all groups with one."""
        return self._scheduler.request_finished(request, (block_ids,))

    def take_events(self) -> "Iterable[KVCacheEvent]":
        self._scheduler.step_ended()
        events: list[KVCacheEvent] = []
        for child in self._children:
            events += child.call("take_events", [], parse=validation.events)
        return events

    def has_pending_block_frees(self) -> bool:
        return any(child.call("has_pending_block_frees", False, parse=validation.truth) for child in self._children)

    def reset_cache(self) -> bool:
        """A child out of service comes back empty anyway."""
        answers = [child.call("reset_cache", False) for child in self._children if child.in_service]
        return all(answer is not False for answer in answers)


def _specs_of(config: "KVTransferConfig") -> list[ChildSpec]:
    return child_specs(
        config.kv_connector_extra_config, config.kv_role, config.engine_id, config.kv_load_failure_policy
    )


def _check_hybrid_support(vllm_config: "VllmConfig", specs: list[ChildSpec]) -> None:
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return
    for spec in specs:
        if not issubclass(spec.cls, SupportsHMA):
            raise ConfigError(
                f"connector {spec.name!r} of the MultiConnector ({spec.cls.__name__}) does not support the hybrid KV "
                "cache manager, which is on: remove the connector or set --disable-hybrid-kv-cache-manager"
            )


def _check_loads(vllm_config: "VllmConfig", specs: list[ChildSpec]) -> None:
    """vLLM defers the freeing of blocks that a step under way still writes only if the role at the top may load."""
    if vllm_config.kv_transfer_config.is_kv_consumer or vllm_config.max_concurrent_batches <= 1:
        return
    for spec in specs:
        if spec.kv_transfer_config.is_kv_consumer:
            raise ConfigError(
                f"kv_role={spec.kv_transfer_config.kv_role!r} of connector {spec.name!r} contradicts "
                "kv_role='kv_producer' of the MultiConnector with asynchronous scheduling or pipeline parallelism, "
                "because vLLM would let it load into blocks that a step still writes: set kv_role of the "
                'MultiConnector to "kv_both"'
            )


def _words(by_name: Mapping[str, object]) -> str:
    return ", ".join(f"{name} ({value})" if isinstance(value, str | int) else name for name, value in by_name.items())
