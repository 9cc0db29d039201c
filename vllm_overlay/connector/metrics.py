# SPDX-License-Identifier: Apache-2.0
"""What HybridOffloadConnector counts: in a form that vLLM carries from any process, and as Prometheus metrics."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_overlay import metrics
from vllm_overlay.common.reasons import DROPPED_STORES, FAILED_LOADS, LOOKUP_LIMITS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class OffloadStats(KVConnectorStats):  # type: ignore[misc, unused-ignore]
    """``data`` = {"name": configured name, "counters": {"metric" or "metric:reason": amount}, "gauges": {...}}.

    Counters add up over ranks and steps; of gauges, which only the scheduler side reports, the last one stays.
    """

    data: dict[str, Any]

    @classmethod
    def make(cls, name: str) -> "OffloadStats":
        return cls(data={"name": name, "counters": Counter(), "gauges": {}})

    def count(self, metric: str, amount: float = 1, reason: str = "") -> None:
        """Adds to one counter; ``reason`` becomes the label of that name."""
        self.data["counters"][f"{metric}:{reason}" if reason else metric] += amount

    def gauge(self, metric: str, value: float) -> None:
        self.data["gauges"][metric] = value

    def take(self) -> "OffloadStats | None":
        """What was counted since the last call, or None."""
        if self.is_empty():
            return None
        taken = OffloadStats(data=self.data)
        self.data = OffloadStats.make(self.data["name"]).data
        return taken

    def to_dict(self) -> dict[str, Any]:
        return {**self.data, "counters": dict(self.data["counters"])}

    def reset(self) -> None:
        self.data = OffloadStats.make(self.data.get("name", "")).data

    def aggregate(self, other: KVConnectorStats) -> "OffloadStats":
        assert isinstance(other, OffloadStats)
        if not self.data:
            self.data = OffloadStats.make(other.data["name"]).data
        self.data["counters"] = Counter(self.data["counters"]) + Counter(other.data["counters"])
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        return {**self.data["counters"], **self.data["gauges"]}

    def is_empty(self) -> bool:
        return not self.data or not (self.data["counters"] or self.data["gauges"])


Metrics = dict[str, Any]


_REASONS = {"lookup_limits": LOOKUP_LIMITS, "dropped_stores": DROPPED_STORES, "failed_loads": FAILED_LOADS}
"""Of the counters with this label; those of hooks are not known before."""


class OffloadPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc, unused-ignore]
    """Exposes ``OffloadStats``. Several connectors share each metric and differ in the label ``connector``."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        name: str,
    ) -> None:
        """``name`` is the connector's. Its counters are there before anything is counted, with 0."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = self._make(metric_types[prometheus_client.Counter], metrics.HYBRID_OFFLOAD_COUNTERS)
        self._gauges = self._make(metric_types[prometheus_client.Gauge], metrics.HYBRID_OFFLOAD_GAUGES)
        for engine in per_engine_labelvalues.values():
            self._begin([*engine, name])

    def _begin(self, labels: list[object]) -> None:
        for counter in metrics.HYBRID_OFFLOAD_COUNTERS:
            if metrics.REASON not in counter.labels:
                self._counters[counter.field].labels(*labels)
            for reason in _REASONS.get(counter.field, ()):
                self._counters[counter.field].labels(*labels, reason.value)

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
