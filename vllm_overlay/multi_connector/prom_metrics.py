# SPDX-License-Identifier: Apache-2.0
"""The Prometheus metrics of a MultiConnector: its own by child, and each child's own under the child's name."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from vllm_overlay.common.reasons import IGNORED_OFFERS
from vllm_overlay.metrics import (
    CONNECTOR,
    MULTI_CONNECTOR,
    MULTI_CONNECTOR_BY_HOOK,
    MULTI_CONNECTOR_BY_REASON,
    MULTI_CONNECTOR_GAUGES,
    MULTI_CONNECTOR_HISTOGRAMS,
    CounterName,
    HistogramName,
)
from vllm_overlay.multi_connector.counters import Counters
from vllm_overlay.multi_connector.harmless import harmless
from vllm_overlay.multi_connector.hooks import HOOKS
from vllm_overlay.multi_connector.stats import OWN, OwnStats

_LABEL_VALUES: tuple[tuple[tuple[CounterName, ...], tuple[str, ...]], ...] = (
    (MULTI_CONNECTOR_BY_HOOK, HOOKS),
    (MULTI_CONNECTOR_BY_REASON, tuple(sorted(IGNORED_OFFERS))),
)
"""Counters with a second label, and all values that it has."""


class _ChildMetric:
    """A metric as one child sees it: the label ``connector`` is filled in behind its back."""

    def __init__(self, metric: Any, child: str) -> None:
        self._metric, self._child = metric, child

    def labels(self, *values: Any, **named: Any) -> Any:
        if named:
            return self._metric.labels(*values, **named, **{CONNECTOR: self._child})
        return self._metric.labels(*values, self._child)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metric, name)


class _Registry:
    """Makes each metric once however many children ask for it, and gives each child its own label value.

    A class that has a label ``connector`` of its own gets the shared metric as it is.
    """

    def __init__(self, metric_types: Mapping[Any, Any]) -> None:
        self._metric_types = metric_types
        self._metrics: dict[str, tuple[Any, tuple[str, ...]]] = {}

    def types_for(self, child: str) -> dict[Any, Any]:
        return {kind: functools.partial(self._make, factory, child) for kind, factory in self._metric_types.items()}

    def _make(
        self,
        factory: Callable[..., Any],
        child: str,
        name: str,
        documentation: str = "",
        labelnames: Iterable[str] | None = None,
        **options: Any,
    ) -> Any:
        wanted = tuple(labelnames or ())
        labels = wanted if CONNECTOR in wanted else (*wanted, CONNECTOR)
        if name not in self._metrics:
            made = factory(name=name, documentation=documentation, labelnames=list(labels), **options)
            self._metrics[name] = made, labels
        metric, existing = self._metrics[name]
        if existing != labels:
            raise ValueError(f"metric {name} has the labels {existing} of another connector, not {labels}")
        return metric if CONNECTOR in wanted else _ChildMetric(metric, child)


class MultiPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc, unused-ignore]
    """Our counters for each child, and each child's own metrics under its name. Lives in the API server's process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        children: Sequence[tuple[str, type[Any], Any]],
    ) -> None:
        """``children``: name, class and configuration of each."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = (*MULTI_CONNECTOR, *MULTI_CONNECTOR_BY_HOOK, *MULTI_CONNECTOR_BY_REASON)
        self._counters = {one.field: self._make(self._counter_cls, one) for one in counters}
        # Of several API servers each step's report goes to one.
        recent = {"multiprocess_mode": "mostrecent"}
        self._gauges = {one.field: self._make(self._gauge_cls, one, **recent) for one in MULTI_CONNECTOR_GAUGES}
        self._histograms = {
            one.field: self._make(self._histogram_cls, one, buckets=one.buckets) for one in MULTI_CONNECTOR_HISTOGRAMS
        }
        names = [name for name, _, _ in children]
        for engine in per_engine_labelvalues.values():
            self._begin(engine, names)
        registry = _Registry({kind: metric_types[kind] for kind in (Gauge, Counter, Histogram)})
        self._children: dict[str, KVConnectorPromMetrics] = {}
        for name, cls, config in children:
            made = None
            with harmless(f"Metrics of connector {name!r} could not be built. Its own metrics are not exported."):
                made = cls.build_prom_metrics(config, registry.types_for(name), labelnames, per_engine_labelvalues)
            if made is not None:
                self._children[name] = made

    def _make(self, factory: Callable[..., Any], one: CounterName | HistogramName, **options: Any) -> Any:
        labels = [*self._labelnames, *one.labels]
        return factory(name=one.name, documentation=one.documentation, labelnames=labels, **options)

    def _begin(self, engine: list[object], names: Sequence[str]) -> None:
        """Every series is there before anything is counted, with 0.

        A weight is not: 0 would say that loading never pays.
        """
        gauges = [gauge for field, gauge in self._gauges.items() if field != "load_weight"]
        for name in names:
            for plain in MULTI_CONNECTOR:
                self._counters[plain.field].labels(*engine, name)
            for metric in (*gauges, *self._histograms.values()):
                metric.labels(*engine, name)
            for counters, values in _LABEL_VALUES:
                for counter in counters:
                    for value in values:
                        self._counters[counter.field].labels(*engine, name, value)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Called by vLLM with what ``MultiStats.to_dict`` wrote. Never raises."""
        with harmless("Statistics of the MultiConnector could not be exported."):
            for name, part in transfer_stats_data.items():
                if name == OWN:
                    self._observe_own(OwnStats(part), self.per_engine_labelvalues[engine_idx])
                elif name in self._children:
                    with harmless(f"Statistics of connector {name!r} could not be exported."):
                        self._children[name].observe(part, engine_idx)

    def _observe_own(self, own: OwnStats, engine: list[object]) -> None:
        for name, counters in own.counters.items():
            self._observe_child(counters, [*engine, name])

    def _observe_child(self, counters: Counters, labels: list[object]) -> None:
        for counter in MULTI_CONNECTOR:
            if amount := getattr(counters, counter.field):
                self._counters[counter.field].labels(*labels).inc(amount)
        for counter in (*MULTI_CONNECTOR_BY_HOOK, *MULTI_CONNECTOR_BY_REASON):
            for value, amount in getattr(counters, counter.field).items():
                self._counters[counter.field].labels(*labels, value).inc(amount)
        for histogram in MULTI_CONNECTOR_HISTOGRAMS:
            for observation in getattr(counters, histogram.field).observations():
                self._histograms[histogram.field].labels(*labels).observe(observation)
        for field_name, level in counters.gauges.items():
            self._gauges[field_name].labels(*labels).set(level)
