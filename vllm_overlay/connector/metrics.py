# SPDX-License-Identifier: Apache-2.0
"""What HybridOffloadConnector counts: in a form that vLLM carries from any process, and as Prometheus metrics."""

from typing import TYPE_CHECKING, Any, Self

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_overlay.common.log_summary import hit_rate, in_bytes, percent, present
from vllm_overlay.exporter import Exporter
from vllm_overlay.metrics import HYBRID_OFFLOAD
from vllm_overlay.tally import Tally

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class OffloadStats(KVConnectorStats):  # type: ignore[misc, unused-ignore]
    """What was counted since the last report."""

    def __init__(self, name: str, tally: Tally) -> None:
        """``name`` is the connector's."""
        super().__init__()
        self.name, self.tally = name, tally

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """From what ``to_dict`` wrote in another process."""
        return cls(data["name"], Tally.from_dict(data["tally"]))

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "tally": self.tally.to_dict()}

    def reset(self) -> None:
        self.tally.take()

    def aggregate(self, other: KVConnectorStats) -> "OffloadStats":
        assert isinstance(other, OffloadStats)
        self.tally.add(other.tally)
        return self

    def reduce(self) -> dict[str, Any]:
        """A few words for vLLM's log line; none while the tier has nothing to do."""
        total, gauges = self.tally.total, self.tally.gauges
        words = present(
            hit=hit_rate(total("restored_tokens"), total("queried_tokens")),
            loaded=in_bytes(total("loaded_bytes")),
            stored=in_bytes(total("stored_bytes")),
            dropped_stores=total("dropped_stores"),
            failed_loads=total("failed_loads"),
            exceptions=total("hook_errors"),
        )
        if words:
            words |= present(full=percent(gauges.get("used_bytes", 0), gauges.get("capacity_bytes", 0)))
        return words

    def is_empty(self) -> bool:
        return self.tally.is_empty()


class LoggedOffloadStats(OffloadStats):
    """The stats as vLLM's log has them, in the front end. Empty when nothing is worth a line, even if there are
    numbers."""

    def is_empty(self) -> bool:
        return not self.reduce()


class OffloadPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc, unused-ignore]
    """Exposes ``OffloadStats``."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        name: str,
    ) -> None:
        """``name`` is the connector's."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._exporter = Exporter(HYBRID_OFFLOAD, metric_types, labelnames, per_engine_labelvalues, [name])

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        stats = OffloadStats.from_dict(transfer_stats_data)
        self._exporter.observe(engine_idx, stats.name, stats.tally)
