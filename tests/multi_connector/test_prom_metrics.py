# SPDX-License-Identifier: Apache-2.0
import functools

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.multi_connector.fakes import FAULTS, NamedPromMetrics, _raise, child, vllm_config
from vllm_overlay.common.reasons import IGNORED_OFFERS
from vllm_overlay.metrics import HOOK, MULTI_CONNECTOR, REASON, Kind
from vllm_overlay.multi_connector import MultiConnector, prom_metrics
from vllm_overlay.multi_connector import child as child_module
from vllm_overlay.multi_connector.hooks import HOOKS
from vllm_overlay.tally import Tally

ENGINE = {"model_name": "m", "engine": "0"}
SUFFIXES = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}


@pytest.fixture(autouse=True)
def forget_what_was_logged():
    child_module._log_exception_once.cache_clear()


class Front:
    """A front end's registry and the metrics vLLM would build for these children."""

    def __init__(self, *children):
        self.registry = CollectorRegistry()

        def kind(cls):
            return lambda **options: cls(**options, registry=self.registry)

        self.metrics = MultiConnector.build_prom_metrics(
            vllm_config(*children),
            {cls: kind(cls) for cls in (Gauge, Counter, Histogram)},
            ["model_name", "engine"],
            {0: ["m", "0"], 1: ["m", "1"]},
        )

    def value(self, name, **labels):
        return self.registry.get_sample_value(name, {**ENGINE, **labels})


def own(**children):
    """A payload of our own tallies."""
    return {"*": {"tallies": {name: tally.to_dict() for name, tally in children.items()}, "classes": {}}}


def test_each_childs_tally_is_exported_under_its_name():
    front = Front(child("a"), child("b"))
    front.metrics.observe(own(a=Tally({"queries": 2, "lookup_wait_seconds": 0.5, "errors:take_events": 3})))
    front.metrics.observe(own(a=Tally({"queries": 1}), b=Tally({"queries": 7})), 0)
    front.metrics.observe(own(a=Tally({"queries": 2}, gauges={"state": 1, "quarantined_requests": 3})), engine_idx=1)
    front.metrics.observe(own(a=Tally({"ignored_offers:load_off": 2}, gauges={"state": 0})), engine_idx=1)
    assert front.value("vllm:kv_connector_queries_total", connector="a") == 3
    assert front.value("vllm:kv_connector_queries_total", connector="b") == 7
    assert front.value("vllm:kv_connector_lookup_wait_seconds_total", connector="a") == 0.5
    assert front.value("vllm:kv_connector_errors_total", connector="a", hook="take_events") == 3
    other = {"connector": "a", "engine": "1"}
    assert front.value("vllm:kv_connector_queries_total", **other) == 2
    assert front.value("vllm:kv_connector_ignored_offers_total", **other, reason="load_off") == 2
    assert front.value("vllm:kv_connector_state", **other) == 0
    assert front.value("vllm:kv_connector_quarantined_requests", **other) == 3


def test_every_series_is_there_from_the_start_but_for_weights_that_no_offer_had_yet():
    front = Front(child("a"), child("b"))
    for name in "ab":
        for engine in "01":
            for field, metric in MULTI_CONNECTOR.items():
                known = None if field == "load_weight" else 0
                hooks = [{"hook": hook} for hook in HOOKS if HOOK in metric.labels]
                reasons = [{"reason": reason} for reason in IGNORED_OFFERS if REASON in metric.labels]
                for labels in hooks or reasons or [{}]:
                    name_there = f"{metric.name}{SUFFIXES[metric.kind]}"
                    assert front.value(name_there, connector=name, engine=engine, **labels) == known


@pytest.mark.parametrize(("cls", "name"), [("FakeChild", "fake_loads"), ("NamedChild", "named_loads")])
def test_two_children_of_one_class_export_their_own_metrics_apart(cls, name):
    front = Front(child("a", cls), child("b", cls))
    front.metrics.observe({"a": {"loads": 1}, "b": {"loads": 2}})
    own = [{} if cls == "NamedChild" else {"kind": one} for one in "ab"]  # the first has the label itself
    found = [front.value(f"vllm:{name}_total", **labels, connector=one) for one, labels in zip("ab", own, strict=True)]
    assert found == [1, 2]


@pytest.mark.parametrize(
    "payload",
    [
        {"a": None},
        {"*": None},
        {"*": {"tallies": {"a": None}, "classes": {}}},
        own(a=Tally({"queries": -5})),
        own(a=Tally({"queries": float("nan")})),
        own(a=Tally({"unknown": 1, "errors:x": 1})),
        own(a=Tally(gauges={"unknown": 1})),
        own(unknown=Tally({"queries": 1})),
        {"a": {"loads": -1}},
        {"a": {}},
        {"unknown": {"loads": 1}},
    ],
)
def test_no_payload_can_raise_into_the_metrics_loop(payload):
    front = Front(child("a"))
    front.metrics.observe(payload)
    front.metrics.observe(own(a=Tally({"queries": 1})), engine_idx=99)


@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("method", ["__init__", "observe"])
def test_a_childs_metrics_that_cannot_be_built_or_exported_hide_neither_ours_nor_anothers(method, error, monkeypatch):
    monkeypatch.setattr(NamedPromMetrics, method, functools.partial(_raise, error))
    front = Front(child("a", "NamedChild"), child("b"))
    front.metrics.observe({**own(a=Tally({"queries": 1})), "a": {"loads": 1}, "b": {"loads": 2}})
    front.metrics.observe({**own(a=Tally({"queries": -5})), "b": {"loads": 1}})
    assert front.value("vllm:kv_connector_queries_total", connector="a") == 1
    assert front.value("vllm:fake_loads_total", kind="b", connector="b") == 3


def test_named_labels_are_filled_in_too():
    registry = CollectorRegistry()
    metric = Counter("x", "d", ["model_name", "connector"], registry=registry)
    prom_metrics._ChildMetric(metric, "a").labels(model_name="m").inc()
    assert registry.get_sample_value("x_total", {"model_name": "m", "connector": "a"}) == 1
    assert prom_metrics._ChildMetric(metric, "a")._type == "counter"


def test_metrics_of_one_name_and_different_labels_are_not_mixed():
    registry = prom_metrics._Registry({Counter: lambda **options: Counter(**options, registry=CollectorRegistry())})
    registry.types_for("a")[Counter]("x", "d", ["model_name"])
    with pytest.raises(ValueError, match="has the labels"):
        registry.types_for("b")[Counter]("x", "d", ["engine"])


def test_vllm_can_build_its_metrics_twice_in_one_process():
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    for _ in range(2):
        unregister_vllm_metrics()
        MultiConnector.build_prom_metrics(
            vllm_config(child("a"), child("b")),
            {cls: cls for cls in (Gauge, Counter, Histogram)},
            ["model_name", "engine"],
            {0: ["m", "0"]},
        )
    unregister_vllm_metrics()
    assert not [name for name in prometheus_client.REGISTRY._names_to_collectors if "kv_connector" in name]
