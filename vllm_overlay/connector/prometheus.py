# SPDX-License-Identifier: Apache-2.0
"""HybridOffloadConnector's Prometheus metrics, in the front end's process."""

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from vllm_overlay import metrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Metrics = dict[str, Any]


class OffloadPromMetrics(KVConnectorPromMetrics):
    """Exposes ``OffloadStats``. Several connectors share each metric and differ in the label ``connector``."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = self._make(metric_types[Counter], metrics.HYBRID_OFFLOAD_COUNTERS)
        self._gauges = self._make(metric_types[Gauge], metrics.HYBRID_OFFLOAD_GAUGES)

    def _make(self, metric_type: Any, names: tuple[metrics.CounterName, ...]) -> Metrics:
        return {
            name.field: metric_type(
                name=name.name, documentation=name.documentation, labelnames=[*self._labelnames, *name.labels]
            )
            for name in names
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = [*self.per_engine_labelvalues[engine_idx], transfer_stats_data.get("name", "")]
        for key, amount in transfer_stats_data.get("counters", {}).items():
            field, _, reason = key.partition(":")
            self._counters[field].labels(*labels, *([reason] if reason else [])).inc(amount)
        for field, value in transfer_stats_data.get("gauges", {}).items():
            self._gauges[field].labels(*labels).set(value)
