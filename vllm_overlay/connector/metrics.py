# SPDX-License-Identifier: Apache-2.0
"""What HybridOffloadConnector counts: in a form that vLLM carries from any process, and as Prometheus metrics."""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_overlay import metrics
from vllm_overlay.common.buckets import Buckets
from vllm_overlay.common.log_summary import hit_rate, in_bytes, percent, present, sum_of
from vllm_overlay.common.reasons import DROPPED_STORES, FAILED_LOADS, GROUP_KINDS, LOOKUP_LIMITS, LOST_TOKENS, Reason

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_BOUNDS = {name.field: name.buckets for name in metrics.HYBRID_OFFLOAD_HISTOGRAMS}


class Source(StrEnum):
    """The metric label ``source``: where most of a prompt came from when it began to be computed."""

    TIER = "tier"
    """This connector loaded most of it."""
    DEVICE = "device"
    """Most of it was in vLLM's own KV cache."""
    OTHER = "other"
    """Another connector below the same MultiConnector loaded most of it."""
    COMPUTED = "computed"
    """Most of it was computed."""


class OffloadStats(KVConnectorStats):  # type: ignore[misc, unused-ignore]
    """``data`` = {"name": configured name, "counters": {...}, "histograms": {...}, "gauges": {...}}.

    Keys of counters (amounts) and histograms (``Buckets``) are "metric" or "metric:label", where the label is the
    reason or the source. Both add up over ranks and steps. Only the scheduler side reports gauges, and the last one
    stays. On the wire ``Buckets`` are lists.
    """

    data: dict[str, Any]

    @classmethod
    def make(cls, name: str) -> Self:
        return cls(data={"name": name, "counters": Counter(), "histograms": {}, "gauges": {}})

    def count(self, metric: str, amount: float = 1, reason: str = "") -> None:
        """Adds to one counter; ``reason`` becomes the label of that name."""
        self.data["counters"][_key(metric, reason)] += amount

    def observe(self, metric: str, value: float, source: str = "") -> None:
        """Adds to one histogram; ``source`` becomes the label of that name."""
        self.observe_all(metric, (value,), source)

    def observe_all(self, metric: str, values: Iterable[float], source: str = "") -> None:
        """As ``observe`` for each."""
        key, histograms = _key(metric, source), self.data["histograms"]
        if (buckets := histograms.get(key)) is None:
            buckets = histograms[key] = Buckets(_BOUNDS[metric])
        for value in values:
            buckets.observe(value)

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
        histograms = {key: _buckets(key, part).to_list() for key, part in self.data.get("histograms", {}).items()}
        return {**self.data, "counters": dict(self.data["counters"]), "histograms": histograms}

    def reset(self) -> None:
        self.data = OffloadStats.make(self.data.get("name", "")).data

    def aggregate(self, other: KVConnectorStats) -> "OffloadStats":
        assert isinstance(other, OffloadStats)
        if not self.data:
            self.data = OffloadStats.make(other.data["name"]).data
        self.data["counters"] = Counter(self.data["counters"]) + Counter(other.data["counters"])
        self.data["histograms"] = {key: _buckets(key, part) for key, part in self.data["histograms"].items()}
        for key, part in other.data["histograms"].items():
            self.data["histograms"].setdefault(key, _buckets(key, ())).add(_buckets(key, part))
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, Any]:
        """A few words for vLLM's log line; none while the tier has nothing to do."""
        counters, gauges = self.data.get("counters", {}), self.data.get("gauges", {})
        words = present(
            hit=hit_rate(counters.get("restored_tokens", 0), counters.get("queried_tokens", 0)),
            loaded=in_bytes(counters.get("loaded_bytes", 0)),
            stored=in_bytes(counters.get("stored_bytes", 0)),
            dropped_stores=sum_of(counters, "dropped_stores"),
            failed_loads=sum_of(counters, "failed_loads"),
            exceptions=sum_of(counters, "hook_errors"),
        )
        if words:
            words |= present(full=percent(gauges.get("used_bytes", 0), gauges.get("capacity_bytes", 0)))
        return words

    def is_empty(self) -> bool:
        return not self.data or not (self.data["counters"] or self.data["histograms"] or self.data["gauges"])


def _key(metric: str, label: str) -> str:
    return f"{metric}:{label}" if label else metric


def _buckets(key: str, part: object) -> Buckets:
    """One histogram of the payload, also from the wire."""
    return part if isinstance(part, Buckets) else Buckets.from_list(_BOUNDS[key.partition(":")[0]], part)


class LoggedOffloadStats(OffloadStats):
    """The stats as vLLM's log has them, in the front end. Empty when nothing is worth a line, even if there are
    numbers."""

    def is_empty(self) -> bool:
        return not self.reduce()


Metrics = dict[str, Any]


_REASONS = {
    "lookup_limits": LOOKUP_LIMITS,
    "lost_tokens": LOST_TOKENS,
    "dropped_stores": DROPPED_STORES,
    "failed_loads": FAILED_LOADS,
}
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
        """``name`` is the connector's. Its counters exist with 0 before anything is counted."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = self._make(metric_types[prometheus_client.Counter], metrics.HYBRID_OFFLOAD_COUNTERS)
        # Of several API servers each step's report goes to one.
        gauge_type = partial(metric_types[prometheus_client.Gauge], multiprocess_mode="mostrecent")
        self._gauges = self._make(gauge_type, metrics.HYBRID_OFFLOAD_GAUGES)
        self._histograms = self._make(metric_types[prometheus_client.Histogram], metrics.HYBRID_OFFLOAD_HISTOGRAMS)
        for engine in per_engine_labelvalues.values():
            self._begin([*engine, name])

    def _begin(self, labels: list[object]) -> None:
        for counter in metrics.HYBRID_OFFLOAD_COUNTERS:
            if metrics.REASON not in counter.labels:
                self._counters[counter.field].labels(*labels)
            for reason in _REASONS.get(counter.field, ()):
                self._counters[counter.field].labels(*labels, *_labels_of(counter.field, reason))
        for histogram in metrics.HYBRID_OFFLOAD_HISTOGRAMS:
            for source in [(one.value,) for one in Source] if metrics.SOURCE in histogram.labels else [()]:
                self._histograms[histogram.field].labels(*labels, *source)

    def _make(self, metric_type: Any, names: Sequence[metrics.CounterName | metrics.HistogramName]) -> Metrics:
        return {
            name.field: metric_type(
                name=name.name,
                documentation=name.documentation,
                labelnames=[*self._labelnames, *name.labels],
                **({"buckets": name.buckets} if isinstance(name, metrics.HistogramName) else {}),
            )
            for name in names
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = [*self.per_engine_labelvalues[engine_idx], transfer_stats_data.get("name", "")]
        for key, amount in transfer_stats_data.get("counters", {}).items():
            field, _, reason = key.partition(":")
            self._counters[field].labels(*labels, *_labels_of(field, reason)).inc(amount)
        for key, part in transfer_stats_data.get("histograms", {}).items():
            field, _, source = key.partition(":")
            histogram = self._histograms[field].labels(*labels, *([source] if source else []))
            for observation in _buckets(key, part).observations():
                histogram.observe(observation)
        for field, value in transfer_stats_data.get("gauges", {}).items():
            self._gauges[field].labels(*labels).set(value)


def _labels_of(field: str, reason: str) -> list[str]:
    """The labels that a counter has beside the connector."""
    if field == "lost_tokens":
        return [reason, GROUP_KINDS.get(Reason(reason), "")]
    return [str(reason)] if reason else []
