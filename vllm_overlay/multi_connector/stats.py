# SPDX-License-Identifier: Apache-2.0
"""Numbers for each child under its configured name, from any process to the log line and to Prometheus.

Two children of one class stay apart, a child loaded by module path works, and nothing here raises into the engine or
into the loop that serves metrics: what cannot be added up or exported is dropped and logged once.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_overlay.metrics import CONNECTOR, MULTI_CONNECTOR, MULTI_CONNECTOR_ERRORS, MULTI_CONNECTOR_GAUGES
from vllm_overlay.multi_connector.harmless import harmless

OWN = "*"
"""The key of our own part among the children's names; no child may have this name."""


@dataclass(slots=True)
class Counters:
    """What the MultiConnector itself counts about one child since the last report; named as metrics.py's fields."""

    queries: int = 0
    asked_tokens: int = 0
    offered_tokens: int = 0
    chosen: int = 0
    outbid: int = 0
    too_slow: int = 0
    loaded_tokens: int = 0
    failed_loads: int = 0
    load_seconds: float = 0.0
    lookup_wait_seconds: float = 0.0
    invalid_answers: int = 0
    ignored_reports: int = 0
    isolations: int = 0
    returns: int = 0
    hangs: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    """Exceptions by hook."""
    gauges: dict[str, float] = field(default_factory=dict)
    """The scheduler's latest values, where they have changed."""

    def count_error(self, hook: str) -> None:
        self.errors[hook] = self.errors.get(hook, 0) + 1

    def add(self, other: "Counters") -> None:
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for hook, count in other.errors.items():
            self.errors[hook] = self.errors.get(hook, 0) + count
        self.gauges.update(other.gauges)

    def is_empty(self) -> bool:
        return self == Counters()

    def to_dict(self) -> dict[str, Any]:
        """Only what is not zero."""
        numbers: dict[str, Any] = {name: value for name in _NUMBERS if (value := getattr(self, name))}
        if self.errors:
            numbers["errors"] = dict(self.errors)
        if self.gauges:
            numbers["gauges"] = dict(self.gauges)
        return numbers

    @classmethod
    def from_dict(cls, data: object) -> "Counters":
        counters = cls()
        if isinstance(data, Mapping):
            for name in _NUMBERS:
                if _is_amount(value := data.get(name, 0)):
                    setattr(counters, name, value)
            counters.errors, counters.gauges = _amounts(data.get("errors")), _amounts(data.get("gauges"))
        return counters


_NUMBERS = tuple(field.name for field in dataclasses.fields(Counters) if field.name not in ("errors", "gauges"))


def _amounts(table: object) -> dict[str, Any]:
    return {str(k): v for k, v in table.items() if _is_amount(v)} if isinstance(table, Mapping) else {}


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


class OwnStats(KVConnectorStats):  # type: ignore[misc, unused-ignore]
    """The MultiConnector's own part: ``data`` is {"counters": {child name: Counters}, "classes": {child name: class}}.

    The class of a child, as "module:qualname", is there when the child has stats, so that another process can rebuild
    them without a registered name. On the wire counters are dictionaries.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        data = data or {}
        counters, classes = data.get("counters"), data.get("classes")
        super().__init__(
            data={
                "counters": {name: _counters(part) for name, part in counters.items()}
                if isinstance(counters, Mapping)
                else {},
                "classes": dict(classes) if isinstance(classes, Mapping) else {},
            }
        )

    @property
    def counters(self) -> dict[str, Counters]:
        counters: dict[str, Counters] = self.data["counters"]
        return counters

    @property
    def classes(self) -> dict[str, Any]:
        classes: dict[str, Any] = self.data["classes"]
        return classes

    def to_dict(self) -> dict[str, Any]:
        return {
            "counters": {name: part.to_dict() for name, part in self.counters.items() if not part.is_empty()},
            "classes": dict(self.classes),
        }

    def aggregate(self, other: KVConnectorStats) -> "OwnStats":
        assert isinstance(other, OwnStats)
        for name, part in other.counters.items():
            self.counters.setdefault(name, Counters()).add(part)
        self.classes.update(other.classes)
        return self

    def reset(self) -> None:
        self.counters.clear()

    def reduce(self) -> dict[str, Any]:
        return {name: part.to_dict() for name, part in self.counters.items() if not part.is_empty()}

    def is_empty(self) -> bool:
        return all(part.is_empty() for part in self.counters.values())


def _counters(part: object) -> Counters:
    return part if isinstance(part, Counters) else Counters.from_dict(part)


class MultiStats(KVConnectorStats):  # type: ignore[misc, unused-ignore]
    """``data``: {child name: the child's own stats}, as the shipped MultiConnector has it, and OwnStats under OWN."""

    data: dict[str, KVConnectorStats]

    @classmethod
    def of(cls, name: str, counters: Counters, stats: KVConnectorStats | None, connector: object) -> "MultiStats":
        """One child's part, as its process sees it."""
        own = OwnStats({"counters": {name: counters}})
        if stats is None:
            return cls(data={OWN: own})
        connector_cls = type(connector)
        own.classes[name] = f"{connector_cls.__module__}:{connector_cls.__qualname__}"
        return cls(data={OWN: own, name: stats})

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> "MultiStats":
        """From what ``to_dict`` wrote in another process. A child that cannot be rebuilt keeps our counters.

        A payload without our own part is none of ours: as with the shipped MultiConnector its names are those of
        registered connectors, and one that is not registered raises ValueError.
        """
        found: dict[str, KVConnectorStats] = {}
        own = data.get(OWN)
        if own is not None and not isinstance(own, OwnStats):
            own = OwnStats(own if isinstance(own, Mapping) else None)
        if own is not None:
            found[OWN] = own
        for name, part in data.items():
            if name == OWN:
                continue
            stats = _rebuilt(name, part, None if own is None else own.classes.get(name, ""))
            if stats is not None:
                found[name] = stats
        return cls(data=found)

    def to_dict(self) -> dict[str, Any]:
        wire: dict[str, Any] = {}
        for name, part in self.data.items():
            with harmless(f"Stats of connector {name!r} could not be written; they are lost."):
                wire[name] = part.to_dict()
        return wire

    def aggregate(self, other: KVConnectorStats) -> "MultiStats":
        for name, part in other.data.items():
            mine = self.data.setdefault(name, part)
            if mine is not part:
                with harmless(f"Stats of connector {name!r} could not be added up; some are lost."):
                    self.data[name] = mine.aggregate(part)
        return self

    def reset(self) -> None:
        for name, part in self.data.items():
            with harmless(f"Stats of connector {name!r} could not be reset."):
                part.reset()

    def reduce(self) -> dict[str, Any]:
        reduced: dict[str, Any] = {}
        for name, part in self.data.items():
            with harmless(f"Stats of connector {name!r} could not be reduced; they are not logged."):
                reduced[name] = part.reduce()
        return reduced

    def is_empty(self) -> bool:
        for name, part in self.data.items():
            empty = False
            with harmless(f"Stats of connector {name!r} could not be asked whether they are empty; taken as not."):
                empty = part.is_empty()
            if not empty:
                return False
        return True


def _rebuilt(name: str, part: object, class_name: str | None) -> KVConnectorStats | None:
    """One child's stats from the wire. ``class_name`` is None where the payload says nothing of classes."""
    if isinstance(part, KVConnectorStats):
        return part
    registered = KVConnectorFactory.get_connector_class_by_name(name) if class_name is None else None
    with harmless(f"Stats of connector {name!r} could not be rebuilt; they are not logged."):
        cls: Any = registered if class_name is None else connector_class(*class_name.split(":", 1))
        stats: KVConnectorStats | None = cls.build_kv_connector_stats(data=part)
        return stats
    return None


@functools.cache
def connector_class(module: str, qualname: str) -> type[Any]:
    """A connector class by where it is defined; raises TypeError for anything else.

    The names come from our own engine process, which got the class from the configuration.
    """
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, KVConnectorBase_V1)):
        raise TypeError(f"{module}.{qualname} is not a KV connector")
    return found


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
        self._counters = {
            counter.field: self._counter_cls(
                name=counter.name, documentation=counter.documentation, labelnames=[*labelnames, *counter.labels]
            )
            for counter in (*MULTI_CONNECTOR, MULTI_CONNECTOR_ERRORS)
        }
        self._gauges = {
            gauge.field: self._gauge_cls(
                name=gauge.name, documentation=gauge.documentation, labelnames=[*labelnames, *gauge.labels]
            )
            for gauge in MULTI_CONNECTOR_GAUGES
        }
        names = [name for name, _, _ in children]
        for engine in per_engine_labelvalues.values():
            self._begin(engine, names)
        registry = _Registry({kind: metric_types[kind] for kind in (Gauge, Counter, Histogram)})
        self._children: dict[str, KVConnectorPromMetrics] = {}
        for name, cls, config in children:
            made = None
            with harmless(f"Metrics of connector {name!r} could not be built; its own are not exported."):
                made = cls.build_prom_metrics(config, registry.types_for(name), labelnames, per_engine_labelvalues)
            if made is not None:
                self._children[name] = made

    def _begin(self, engine: list[object], names: Sequence[str]) -> None:
        """Every series is there before anything is counted, with 0; but for errors, whose hooks nobody knows."""
        for name in names:
            for metric in (*MULTI_CONNECTOR, *MULTI_CONNECTOR_GAUGES):
                (self._counters.get(metric.field) or self._gauges[metric.field]).labels(*engine, name)

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
            for counter in MULTI_CONNECTOR:
                if amount := getattr(counters, counter.field):
                    self._counters[counter.field].labels(*engine, name).inc(amount)
            for hook, amount in counters.errors.items():
                self._counters[MULTI_CONNECTOR_ERRORS.field].labels(*engine, name, hook).inc(amount)
            for field_name, value in counters.gauges.items():
                self._gauges[field_name].labels(*engine, name).set(value)
