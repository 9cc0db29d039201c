# SPDX-License-Identifier: Apache-2.0
"""vLLM's OffloadingConnector, which tells a secondary tier of ours which engine it is built for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as vllms
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from vllm_overlay.config import ConfigError
from vllm_overlay.named_child import NamedChild
from vllm_overlay.offloading.settings import check_engine, check_offloading, own_tiers
from vllm_overlay.offloading.stats import zeros
from vllm_overlay.plugin import SECONDARY_TIER
from vllm_overlay.tiers.base import TierSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """What an engine computes with, and what its KV cache holds."""

    vllm_config: "VllmConfig"
    kv_cache_config: "KVCacheConfig"


_being_built: list[ServedEngine] = []
"""The engine whose connector is being built in this process: none, or one."""


class OffloadingConnector(vllms.OffloadingConnector, NamedChild):
    """The plug-in makes this the class of ``"kv_connector": "OffloadingConnector"``.

    vLLM hands a secondary tier the model's name and the shape of its KV cache. That is too little to tell weights and
    settings apart that compute other numbers. The counters of a tier of ours begin with 0. The rest is vLLM's own.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        _being_built.append(ServedEngine(vllm_config, kv_cache_config))
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        finally:
            _being_built.pop()
        self.reads_while_looking = bool(vllm_config.kv_transfer_config.kv_connector_extra_config.get("secondary_tiers"))

    @classmethod
    def child_name(cls, extra_config: Mapping[str, Any]) -> str | None:
        return None

    @classmethod
    def check_child(cls, extra_config: Mapping[str, Any]) -> dict[str, str]:
        check_offloading(extra_config)
        return {}

    @classmethod
    def check_engine(cls, vllm_config: "VllmConfig") -> None:
        """Called when vLLM makes its configuration. Raises ConfigError for what a tier of ours cannot serve."""
        if own_tiers(vllm_config.kv_transfer_config.kv_connector_extra_config):
            check_engine(vllm_config)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        made = super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        begun = zeros(SECONDARY_TIER).data
        # A spec that reads no secondary tiers does not know their metrics.
        if made._offloading_metric_metadata.keys() >= begun["data"].keys():
            for engine in per_engine_labelvalues:
                made.observe(begun, engine)
        return made

    @classmethod
    def prior_load_weight(cls, extra_config: Mapping[str, Any]) -> float:
        return TierSpec.prior_load_weight


def engine_being_built() -> ServedEngine:
    """Called by a secondary tier that is being made. Raises ConfigError outside an OffloadingConnector."""
    if not _being_built:
        raise ConfigError(
            "a hybrid_disk tier is made by vLLM's OffloadingConnector alone: "
            'set "kv_connector": "OffloadingConnector" without a kv_connector_module_path'
        )
    return _being_built[-1]
