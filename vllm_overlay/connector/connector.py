# SPDX-License-Identifier: Apache-2.0
"""HybridOffloadConnector: vLLM's connector interface in front of one tier. No exception leaves it at run time."""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_overlay.common.reasons import Reason
from vllm_overlay.config import ConfigError
from vllm_overlay.connector.compatibility import check_supported, states_end_with_requests
from vllm_overlay.connector.guard import never_fatal
from vllm_overlay.connector.metadata import OffloadHandshake, OffloadMetadata, OffloadWorkerMetadata, StoreJob
from vllm_overlay.connector.metrics import LoggedOffloadStats, OffloadPromMetrics, OffloadStats
from vllm_overlay.connector.placement import NULL_BLOCK
from vllm_overlay.connector.scheduler import OffloadScheduler
from vllm_overlay.connector.worker import OffloadWorker
from vllm_overlay.named_child import NamedChild, QuietResults, QuietStep, empty_hook
from vllm_overlay.plugin import prepare_process
from vllm_overlay.tally import ReportTimes, Tally
from vllm_overlay.tiers.base import TierSpec
from vllm_overlay.tiers.factory import tier_spec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_QUIET_STEP = QuietStep()

_UNGUARDED = (
    "register_kv_caches",
    "get_handshake_metadata",
    "set_xfer_handshake_metadata",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "requires_kv_delivery",
)
"""Members that vLLM asks for at start or of the class. What cannot work is refused there, with a sentence."""

_ANSWERS: dict[str, Callable[[], Any]] = {
    "get_num_new_matched_tokens": lambda: (0, False),
    "build_connector_meta": OffloadMetadata,
    "_plan_stores": tuple,
    "get_transfer_results": KVConnectorTransferResults,
    "get_block_ids_with_load_errors": set,
    **dict.fromkeys(("request_finished", "request_finished_all_groups"), lambda: (False, None)),
    **dict.fromkeys(("completes_local_attention", "has_pending_push_work", "reset_cache"), lambda: False),
    **dict.fromkeys(("update_state_after_alloc", "update_connector_output", "bind_connector_metadata"), lambda: None),
    **dict.fromkeys(("start_load_kv", "_check_adapters", "wait_for_layer_load", "save_kv_layer"), lambda: None),
    **dict.fromkeys(("wait_for_save", "build_connector_worker_meta", "get_kv_connector_stats"), lambda: None),
    **dict.fromkeys(("shutdown", "_close_worker"), lambda: None),
}
"""What a hook answers when it fails. The answer does no harm: for that call the engine goes on without this tier."""


@never_fatal(KVConnectorBase_V1, answers=_ANSWERS, unguarded=_UNGUARDED)
class HybridOffloadConnector(KVConnectorBase_V1, SupportsHMA, NamedChild):  # type: ignore[misc, unused-ignore]
    """One tier behind vLLM's interface. Built once in the scheduler and once in every worker; see docs/architecture.md.

    Raises ConfigError (a sentence that names the setting) for settings that cannot work. Raises UnpatchedError when the
    installed vLLM lacks our patches.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        prepare_process()
        self._spec = tier_spec(self._kv_transfer_config.kv_connector_extra_config)
        self.settings = self._spec.settings
        check_supported(vllm_config, kv_cache_config, self._spec)
        self._cache_hit_source = _hit_source(self._spec)
        self._set_failure_policy()
        self._tally = Tally()
        self._report_times = ReportTimes()
        # vLLM asks this before it calls hooks of a layer, and ours do nothing.
        self.has_connector_metadata = bool
        self._scheduler: OffloadScheduler | None = None
        self._worker: OffloadWorker | None = None
        self._handshake: OffloadHandshake | None = None
        self._failures_logged: set[str] = set()
        self._is_idle = states_end_with_requests(kv_cache_config)
        if self._is_idle and role is KVConnectorRole.SCHEDULER:
            logger.warning(
                "%s: nothing is stored or restored, because vLLM keeps no state of this model beyond its request: "
                "set --enable-prefix-caching --mamba-cache-mode align",
                self.settings.name,
            )

    def _set_failure_policy(self) -> None:
        """vLLM's default fails the request. A cache should only cost time. The scheduler reads this after us."""
        if self._kv_transfer_config.kv_load_failure_policy != self.settings.load_failure_policy:
            logger.info(
                "%s: a failed load leads to %s (load_failure_policy)",
                self.settings.name,
                "recomputation" if self.settings.load_failure_policy == "recompute" else "a failed request",
            )
            self._kv_transfer_config.kv_load_failure_policy = self.settings.load_failure_policy

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store is a future miss: nothing has to be delivered."""
        return False

    def hook_failed(self, hook: str, error: BaseException) -> None:
        """Counts an unexpected error of a hook, and logs the first one of each hook with its trace."""
        self._tally.count("hook_errors", label=hook)
        if hook not in self._failures_logged:
            self._failures_logged.add(hook)
            logger.error("%s: %s failed; the engine goes on without it", self.settings.name, hook, exc_info=error)

    # As a child of a MultiConnector, before it is built.

    @classmethod
    def child_name(cls, extra_config: Mapping[str, Any]) -> str | None:
        tier = extra_config.get("tier")
        return tier if isinstance(tier, str) and tier else None

    @classmethod
    def check_child(cls, extra_config: Mapping[str, Any]) -> dict[str, str]:
        return tier_spec(extra_config).exclusive()

    @classmethod
    def prior_load_weight(cls, extra_config: Mapping[str, Any]) -> float:
        return tier_spec(extra_config).prior_load_weight

    # Start: workers tell the scheduler what they have learned.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._is_idle:
            return
        # Not at the top: it imports numba, which vLLM's rebinding of Triton kernels at worker start trips over.
        from vllm_overlay.connector.factory import build_worker

        self._worker, self._handshake = build_worker(
            self._vllm_config, self._kv_cache_config, self._spec, self._tally, kv_caches
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._handshake

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        if self._is_idle:
            return
        handshakes = [metadata[rank] for rank in sorted(metadata)]
        known = [handshake for handshake in handshakes if isinstance(handshake, OffloadHandshake)]
        if len(known) != len(handshakes):
            raise ConfigError(f"{self.settings.name}: the workers' handshake is another connector's")
        from vllm_overlay.connector.factory import build_scheduler

        self._scheduler = build_scheduler(self._vllm_config, self._spec, self._tally, known)

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._scheduler.lookup(request, num_computed_tokens) if self._scheduler is not None else 0
        return num_tokens, bool(num_tokens)

    def completes_local_attention(self, request: "Request") -> bool:
        """Called by the scheduler after an offer (patch 0012). Whether the load leaves out attention that is local."""
        return self._scheduler is not None and self._scheduler.completes_local_attention(request)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, _blocks_to_load(blocks), num_external_tokens)

    def _recover_update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self._scheduler is not None and num_external_tokens > 0:
            self._scheduler.plan_failed(request.request_id)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        if self._scheduler is None:
            return _QUIET_STEP
        is_quiet = self._scheduler.has_nothing_to_do(scheduler_output)
        # Workers say in which step they have loaded an adapter, so with adapters they hear of each.
        if is_quiet and self._vllm_config.lora_config is None:
            return _QUIET_STEP
        metadata = self._scheduler.begin_step(scheduler_output.num_scheduled_tokens)
        metadata.stores = self._plan_stores(scheduler_output)
        has_work = metadata or self._vllm_config.lora_config is not None or self._scheduler.has_reports_left
        return metadata if has_work else _QUIET_STEP

    def _plan_stores(self, scheduler_output: "SchedulerOutput") -> tuple[StoreJob, ...]:
        """Guarded by itself: this step's loads go out whatever becomes of its stores."""
        return self._scheduler.plan_stores(scheduler_output) if self._scheduler is not None else ()

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if self._scheduler is not None:
            reported = connector_output.kv_connector_worker_meta
            metadata = reported if isinstance(reported, OffloadWorkerMetadata) else None
            self._scheduler.update(connector_output, metadata)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_work()

    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.clear()
        return True

    # Worker side.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, OffloadMetadata):
            self._worker.begin_loads(connector_metadata.loads)

    def _recover_bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None and isinstance(connector_metadata, OffloadMetadata):
            self._worker.fail_loads(connector_metadata.loads, (), Reason.HOOK_ERROR)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, OffloadMetadata):
            self._worker.begin_step(metadata.step)
            if metadata.checks:
                self._check_adapters(metadata)
            if metadata.overdue_stores or metadata.overdue_loads:
                self._worker.answer(metadata.overdue_stores, metadata.overdue_loads)
            self._worker.start_loads(metadata.loads, metadata.failed_loads)

    def _recover_start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, OffloadMetadata):
            self._worker.fail_loads(metadata.loads, metadata.failed_loads, Reason.HOOK_ERROR)

    def _check_adapters(self, metadata: OffloadMetadata) -> None:
        """Guarded by itself: when it fails, nobody knows which adapter computed, and what was restored is not
        believed."""
        if self._worker is not None:
            self._worker.check_adapters(metadata.checks)

    def _recover__check_adapters(self, metadata: OffloadMetadata) -> None:
        if self._worker is not None:
            self._worker.fail_checks(metadata.checks)

    @empty_hook
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: nothing to wait for."""

    @empty_hook
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Whole steps are stored, in ``wait_for_save``."""

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, OffloadMetadata) and metadata.stores:
            self._worker.store(metadata.stores)

    def _recover_wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, OffloadMetadata):
            self._worker.fail_stores(metadata.stores, Reason.HOOK_ERROR)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return QuietResults()
        self._worker.advance()
        if self._worker.is_quiet:
            return QuietResults()
        finished, failed = self._worker.take_finished()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_metadata() if self._worker is not None else None

    # Both sides.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        has_failed = bool(self._tally.total("hook_errors"))  # which is told at once: what else tells may have failed
        if self._worker is not None and not has_failed:
            return None  # what it counts goes to the scheduler's half with what it reports
        if self._scheduler is not None:
            if not self._report_times.is_due() and self._scheduler.has_requests and not has_failed:
                return None
            self._scheduler.record_gauges()
        if self._tally.is_empty():
            return None
        return OffloadStats(self.settings.name, self._tally.take())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return LoggedOffloadStats("", Tally()) if data is None else LoggedOffloadStats.from_dict(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        name = tier_spec(vllm_config.kv_transfer_config.kv_connector_extra_config).settings.name
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, name)

    def shutdown(self) -> None:
        self._close_worker()
        if self._scheduler is not None:
            self._scheduler.close()

    def _close_worker(self) -> None:
        if self._worker is not None and (given_up := self._worker.close(self.settings.shutdown_timeout_s)):
            logger.warning("%s: %d stores were given up at shutdown", self.settings.name, given_up)


def _blocks_to_load(blocks: "KVCacheBlocks") -> tuple[list[int], ...]:
    """A request's blocks. Those that the device cache has already are null, because other requests may share them."""
    return tuple(
        [NULL_BLOCK if block.block_hash is not None else block.block_id for block in group] for group in blocks.blocks
    )


def _hit_source(spec: TierSpec[Any]) -> CacheHitSource:
    try:
        return CacheHitSource(spec.hit_source)
    except ValueError:
        known = ", ".join(source.value for source in CacheHitSource)
        said = f"{spec.settings.name}: hit_source={spec.hit_source!r} of {type(spec).__name__} must be one of {known}"
        raise ConfigError(said) from None
