# SPDX-License-Identifier: Apache-2.0
"""One family of metrics in the front end's Prometheus registry."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import prometheus_client

from vllm_overlay.common.reasons import GROUP_KINDS, Reason
from vllm_overlay.metrics import GROUP_KIND, HOOK, Kind, Metric
from vllm_overlay.tally import Tally

_TYPES = {
    Kind.COUNTER: prometheus_client.Counter,
    Kind.GAUGE: prometheus_client.Gauge,
    Kind.HISTOGRAM: prometheus_client.Histogram,
}

_BEFORE_ANY_REPORT = 1.0
"""In seconds since 1970. Prometheus' client does not show what was set at 0, where several API servers share gauges."""


class Exporter:
    """Makes each metric once. Several connectors share it and differ in the label ``connector``."""

    def __init__(
        self,
        family: Mapping[str, Metric],
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        engines: Mapping[int, Sequence[object]],
        connectors: Iterable[str],
        hooks: Iterable[str] = (),
    ) -> None:
        """``metric_types``, ``labelnames`` and ``engines`` are vLLM's: see ``KVConnectorPromMetrics``. The series of
        these connectors and ``hooks`` are there with 0 before anything is counted."""
        self._family = family
        self._engines = engines
        self._made = {field: _make(metric, metric_types, labelnames) for field, metric in family.items()}
        self._series = cache(self._find)  # a name, an engine, a connector and a reason each: a bounded number
        for engine in engines:
            for connector in connectors:
                for field, metric in family.items():
                    for label in hooks if HOOK in metric.labels else sorted(metric.zeros):
                        series = self._series(engine, connector, f"{field}:{label}")
                        if metric.kind is Kind.GAUGE:
                            _set(series, 0, _BEFORE_ANY_REPORT)

    def observe(self, engine: int, connector: str, tally: Tally) -> None:
        """Adds one report."""
        for key, amount in tally.counters.items():
            self._series(engine, connector, key).inc(amount)
        for key, buckets in tally.histograms.items():
            histogram = self._series(engine, connector, key)
            for observation in buckets.observations():
                histogram.observe(observation)
        for key, level in tally.gauges.items():
            _set(self._series(engine, connector, key), level, tally.sent_at)

    def _find(self, engine: int, connector: str, key: str) -> Any:
        """``key``: as a tally has it."""
        field, _, label = key.partition(":")
        labels = [*self._engines[engine], connector, *([label] if label else [])]
        if GROUP_KIND in self._family[field].labels:
            labels.append(GROUP_KINDS.get(Reason(label), ""))
        return self._made[field].labels(*labels)


def _set(gauge: Any, level: float, at: float) -> None:
    """``Gauge.set`` takes the time at which this API server hears of a level, and may hear of it after another one has
    heard of a later one. The newest by the engine's own time is the one to show."""
    if (value := getattr(gauge, "_value", None)) is not None:
        value.set(float(level), timestamp=at)
    else:
        gauge.set(level)  # Ray's


def _make(metric: Metric, metric_types: Mapping[Any, Any], labelnames: Sequence[str]) -> Any:
    options: dict[str, Any] = {}
    if metric.kind is Kind.HISTOGRAM:
        options["buckets"] = metric.buckets
    elif metric.kind is Kind.GAUGE:
        # Of several API servers each step's report goes to one; each shows what all were told.
        options["multiprocess_mode"] = "mostrecent"
    return metric_types[_TYPES[metric.kind]](
        name=metric.name, documentation=metric.documentation, labelnames=[*labelnames, *metric.labels], **options
    )
