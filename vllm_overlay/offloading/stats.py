# SPDX-License-Identifier: Apache-2.0
"""What a secondary tier counts, among the numbers that vLLM's OffloadingConnector reports: with the names of
HybridOffloadConnector's metrics, so that dashboards and commands know it."""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from vllm_overlay.connector.gauges import Gauges
from vllm_overlay.metrics import HYBRID_OFFLOAD, Kind
from vllm_overlay.tally import Tally, metric_of
from vllm_overlay.tiers.base import TierUsage

COUNTED = (
    *("loaded_objects", "loaded_bytes", "stored_objects", "stored_bytes", "evicted_objects"),
    *("dropped_stores", "failed_loads", "store_seconds", "objects", "used_bytes", "capacity_bytes"),
    *("chunk_tokens", "restore_unit_tokens", "block_tokens", "pending_stores", "pending_loads", "loads_paused"),
)
"""Of ``HYBRID_OFFLOAD``: what such a tier can know. Requests and their tokens are vLLM's to count."""


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """What vLLM's front end is to expose, by name."""
    made: dict[str, OffloadingMetricMetadata] = {}
    for metric in map(HYBRID_OFFLOAD.__getitem__, COUNTED):
        if metric.kind is Kind.HISTOGRAM:
            made[metric.name] = OffloadingHistogramMetadata(metric.documentation, metric.labels, metric.buckets)
        else:
            cls = OffloadingCounterMetadata if metric.kind is Kind.COUNTER else OffloadingGaugeMetadata
            made[metric.name] = cls(metric.documentation, metric.labels)
    return made


def zeros(name: str) -> OffloadingConnectorStats:
    """Every counter at 0, for the connector of this name: of one that begins with its first failure, Prometheus sees
    no increase."""
    stats = OffloadingConnectorStats()
    for metric in map(HYBRID_OFFLOAD.__getitem__, COUNTED):
        if metric.kind is Kind.COUNTER:
            for label in metric.zeros:
                stats.increase_counter(metric.name, 0, _labels(name, label))
    return stats


def _labels(name: str, label: str) -> tuple[str, ...]:
    return (name, label) if label else (name,)


class TierStats:
    """Called from the scheduler's thread."""

    def __init__(self, name: str, tokens: int) -> None:
        """``name``: what the label ``connector`` says. ``tokens``: of the largest chunk, where restores end."""
        self._name = name
        self.tally = Tally()
        self._gauges = Gauges(self.tally, chunk_tokens=tokens, restore_unit_tokens=tokens, block_tokens=tokens)

    def take(self, usage: TierUsage, **levels: float) -> OffloadingConnectorStats | None:
        """All since the last call; None when nothing has changed. ``levels``: what is under way."""
        self._gauges.record(usage, **levels)
        if self.tally.is_empty():
            return None
        taken, stats = self.tally.take(), OffloadingConnectorStats()
        for key, amount in taken.counters.items():
            stats.increase_counter(*self._series(key, amount))
        for key, buckets in taken.histograms.items():
            for observation in buckets.observations():
                stats.observe_histogram(*self._series(key, observation))
        for key, level in taken.gauges.items():
            stats.set_gauge(*self._series(key, level))
        return stats

    def _series(self, key: str, value: float) -> tuple[str, float, tuple[str, ...]]:
        """A metric's name, the value, and the values of its own labels."""
        return HYBRID_OFFLOAD[metric_of(key)].name, value, _labels(self._name, key.partition(":")[2])
