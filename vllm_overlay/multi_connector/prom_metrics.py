# SPDX-License-Identifier: Apache-2.0
"""The Prometheus metrics of a MultiConnector: its own by child, and each child's own under the child's name."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from vllm_overlay.exporter import Exporter
from vllm_overlay.metrics import CONNECTOR, MULTI_CONNECTOR
from vllm_overlay.multi_connector.child import harmless
from vllm_overlay.multi_connector.hooks import HOOKS
from vllm_overlay.multi_connector.stats import OWN, tallies_of


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
    """Our metrics of each child, and each child's own metrics under its name. Lives in the API server's process."""

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
        names = [name for name, _, _ in children]
        self._exporter = Exporter(MULTI_CONNECTOR, metric_types, labelnames, per_engine_labelvalues, names, hooks=HOOKS)
        registry = _Registry({kind: metric_types[kind] for kind in (Gauge, Counter, Histogram)})
        self._children: dict[str, KVConnectorPromMetrics] = {}
        for name, cls, config in children:
            made = None
            with harmless(f"Metrics of connector {name!r} could not be built. Its own metrics are not exported."):
                made = cls.build_prom_metrics(config, registry.types_for(name), labelnames, per_engine_labelvalues)
            if made is not None:
                self._children[name] = made

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Called by vLLM with what ``MultiStats.to_dict`` wrote. Never raises."""
        for name, part in transfer_stats_data.items():
            with harmless(f"Statistics of connector {name!r} could not be exported."):
                if name == OWN:
                    for child, tally in tallies_of(part).items():
                        self._exporter.observe(engine_idx, child, tally)
                elif name in self._children:
                    self._children[name].observe(part, engine_idx)
