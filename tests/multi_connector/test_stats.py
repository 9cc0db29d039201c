# SPDX-License-Identifier: Apache-2.0
import json

import msgspec
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

from tests.multi_connector.fakes import ENDINGS, FAULTS, FakeChild, FakeStats, child, multi, vllm_config
from vllm_overlay.metrics import MULTI_CONNECTOR, MULTI_CONNECTOR_ERRORS, MULTI_CONNECTOR_GAUGES
from vllm_overlay.multi_connector import MultiConnector, harmless, stats
from vllm_overlay.multi_connector.stats import Counters, MultiStats

ENGINE = {"model_name": "m", "engine": "0"}


@pytest.fixture(autouse=True)
def forget_what_was_logged():
    harmless.log_once.cache_clear()


def connector_with_stats(*loads, **settings):
    connector = multi(*[child(name) for name in "ab"[: len(loads)]], **settings)
    for fake, number in zip(connector.sub_connectors, loads, strict=True):
        fake.answers["get_kv_connector_stats"] = lambda number=number: FakeStats(data={"loads": number})
    return connector


def wire(found):
    """As the scheduler sends it to the front end."""
    packed = msgspec.msgpack.encode(found.to_dict())
    return msgspec.msgpack.decode(packed)


def counted(found, name):
    """Our own counters of one child."""
    return found.data["*"].counters[name]


def test_two_children_of_one_class_stay_apart():
    data = wire(connector_with_stats(1, 2).get_kv_connector_stats())
    assert (data["a"], data["b"]) == ({"loads": 1}, {"loads": 2})
    json.dumps(data)


def test_stats_survive_the_way_to_the_front_end():
    connector = connector_with_stats(1, 2)
    connector._children[0].counters.add(Counters(chosen=3, load_seconds=0.5, errors={"take_events": 2}))
    sent = connector.get_kv_connector_stats()
    received = MultiConnector.build_kv_connector_stats(wire(sent))
    assert counted(received, "a") == Counters(chosen=3, load_seconds=0.5, errors={"take_events": 2})
    assert isinstance(received.data["a"], FakeStats)
    assert received.to_dict() == sent.to_dict()
    assert received.reduce() == {
        "*": {"a": {"chosen": 3, "load_seconds": 0.5, "errors": {"take_events": 2}}},
        "a": {"loads": 1},
        "b": {"loads": 2},
    }


def test_counters_are_increments():
    connector = connector_with_stats(0)
    connector._children[0].counters.chosen = 1
    assert counted(connector.get_kv_connector_stats(), "a").chosen == 1
    assert connector.get_kv_connector_stats() is None


def test_workers_and_schedulers_stats_add_up():
    total = connector_with_stats(1).get_kv_connector_stats()
    other = connector_with_stats(10, 5)
    other._children[0].counters.add(Counters(chosen=2, errors={"x": 1}))
    total = total.aggregate(other.get_kv_connector_stats()).aggregate(
        MultiStats.of("a", Counters(chosen=1, errors={"x": 1, "y": 1}), None, object())
    )
    assert (total.data["a"].data, total.data["b"].data) == ({"loads": 11}, {"loads": 5})
    assert counted(total, "a") == Counters(chosen=3, errors={"x": 2, "y": 1})


def test_a_child_without_stats_takes_the_first_that_come():
    total = MultiStats.of("a", Counters(), None, object()).aggregate(connector_with_stats(1).get_kv_connector_stats())
    assert wire(total)["a"] == {"loads": 1}
    assert wire(total)["*"]["classes"] == {"a": "tests.multi_connector.fakes:FakeChild"}


def test_nothing_is_empty_and_reset_makes_it_so():
    assert MultiConnector.build_kv_connector_stats().is_empty()
    assert multi().get_kv_connector_stats() is None
    found = connector_with_stats(1).get_kv_connector_stats()
    assert not found.is_empty()
    found.reset()
    assert found.is_empty()


@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("what", ["aggregate", "reduce", "is_empty", "to_dict"])
def test_a_childs_stats_that_raise_harm_nobody(what, error, monkeypatch):
    monkeypatch.setattr(FakeStats, "error", error)
    connector = connector_with_stats(1, 2)
    bad = FakeStats(data={"loads": 1, "raises": what})
    connector.sub_connectors[0].answers["get_kv_connector_stats"] = lambda: bad
    found = connector.get_kv_connector_stats()
    found = found.aggregate(connector_with_stats(1, 2).get_kv_connector_stats())
    found.is_empty()
    assert found.reduce()["b"] == {"loads": 4}
    assert wire(found)["b"] == {"loads": 4}


@pytest.mark.parametrize(
    "classes",
    [
        {"a": "tests.multi_connector.fakes:Impostor"},
        {"a": "no.such.module:X"},
        {"a": "tests.multi_connector.fakes:NoSuchClass"},
        {"a": ""},
        {},
        None,
    ],
)
def test_stats_of_a_child_that_cannot_be_rebuilt_keep_our_counters(classes):
    own = {"counters": {"a": {"chosen": 1}}, "classes": classes}
    received = MultiConnector.build_kv_connector_stats({"*": own, "a": {"loads": 1}})
    assert counted(received, "a").chosen == 1
    assert received.reduce() == {"*": {"a": {"chosen": 1}}}


@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("own", [{"*": {"classes": {"a": "tests.multi_connector.fakes:FakeChild"}}}, {}])
def test_a_class_that_raises_while_its_stats_are_rebuilt_harms_nobody(own, error, monkeypatch):
    def raises(cls, data=None):
        raise error

    monkeypatch.setattr(FakeChild, "build_kv_connector_stats", classmethod(raises))
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class_by_name", lambda name: FakeChild)
    assert MultiConnector.build_kv_connector_stats({**own, "a": {"loads": 1}}).is_empty()


@pytest.mark.parametrize("own", [None, 5, [], {"counters": None}, {"counters": {"a": {"chosen": "x", "errors": 5}}}])
def test_what_is_no_payload_is_nothing(own):
    assert MultiConnector.build_kv_connector_stats({"*": own}).is_empty()


@pytest.mark.parametrize("error", ENDINGS)
def test_a_shutdown_passes_through_stats(error, monkeypatch):
    monkeypatch.setattr(FakeStats, "error", error)
    found = connector_with_stats(1, 2).get_kv_connector_stats()
    found.data["a"].data["raises"] = "reduce"
    with pytest.raises(error):
        found.reduce()


@pytest.mark.parametrize("error", FAULTS)
def test_stats_that_cannot_be_reset_do_not_stop_the_others_reset(error, monkeypatch):
    monkeypatch.setattr(FakeStats, "error", error)
    found = connector_with_stats(1, 2).get_kv_connector_stats()
    found.data["a"].data["raises"] = "reset"
    found.reset()
    assert (found.data["a"].data["loads"], found.data["b"].data["loads"]) == (1, 0)


def test_vllms_log_line_shows_each_child():
    logging = KVConnectorLogging(vllm_config(child("a"), child("b")).kv_transfer_config)
    for _ in range(2):
        logging.observe(wire(connector_with_stats(1, 2).get_kv_connector_stats()))
    lines = []
    logging.log(log_fn=lambda *args: lines.append(args))
    assert lines == [("KV Transfer metrics: %s", "*={}, a={'loads': 2}, b={'loads': 4}")]


# ---- Prometheus.


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
    """A payload of our own counters."""
    return {"*": {"counters": children, "classes": {}}}


def test_each_childs_counters_are_exported_under_its_name():
    front = Front(child("a"), child("b"))
    front.metrics.observe(own(a={"queries": 2, "load_seconds": 0.5, "errors": {"take_events": 3}}))
    front.metrics.observe(own(a={"queries": 1}, b={"queries": 7}), 0)
    assert front.value("vllm:kv_connector_queries_total", connector="a") == 3
    assert front.value("vllm:kv_connector_queries_total", connector="b") == 7
    assert front.value("vllm:kv_connector_load_seconds_total", connector="a") == 0.5
    assert front.value("vllm:kv_connector_errors_total", connector="a", hook="take_events") == 3


def test_every_series_is_there_from_the_start():
    front = Front(child("a"), child("b"))
    for name in "ab":
        for engine in "01":
            for counter in MULTI_CONNECTOR:
                assert front.value(f"{counter.name}_total", connector=name, engine=engine) == 0
            for gauge in MULTI_CONNECTOR_GAUGES:
                assert front.value(gauge.name, connector=name, engine=engine) == 0


def test_gauges_hold_their_latest_value():
    front = Front(child("a"))
    front.metrics.observe(own(a={"gauges": {"state": 1, "quarantined_requests": 3}}))
    front.metrics.observe(own(a={"gauges": {"state": 0}}))
    assert front.value("vllm:kv_connector_state", connector="a") == 0
    assert front.value("vllm:kv_connector_quarantined_requests", connector="a") == 3


def test_another_engines_counters_are_its_own():
    front = Front(child("a"))
    front.metrics.observe(own(a={"queries": 2}), engine_idx=1)
    assert front.value("vllm:kv_connector_queries_total", connector="a", engine="1") == 2
    assert front.value("vllm:kv_connector_queries_total", connector="a") == 0


def test_every_counter_has_a_metric_and_every_metric_a_counter():
    fields = {counter.field for counter in (*MULTI_CONNECTOR, MULTI_CONNECTOR_ERRORS)}
    assert fields == set(Counters.__dataclass_fields__) - {"gauges"}
    assert all(counter.name.startswith("vllm:kv_connector_") for counter in MULTI_CONNECTOR)


def test_two_children_of_one_class_export_their_own_metrics_apart():
    front = Front(child("a"), child("b"))
    front.metrics.observe({"a": {"loads": 1}, "b": {"loads": 2}})
    assert front.value("vllm:fake_loads_total", kind="k", connector="a") == 1
    assert front.value("vllm:fake_loads_total", kind="k", connector="b") == 2


def test_a_class_with_a_connector_label_of_its_own_keeps_it():
    front = Front(child("a", "NamedChild"), child("b", "NamedChild"))
    front.metrics.observe({"a": {"loads": 1}, "b": {"loads": 2}})
    assert front.value("vllm:named_loads_total", connector="a") == 1
    assert front.value("vllm:named_loads_total", connector="b") == 2


@pytest.mark.parametrize("error", FAULTS)
def test_a_child_whose_metrics_cannot_be_built_keeps_our_counters(error, monkeypatch):
    monkeypatch.setattr(FakeStats, "error", error)
    front = Front(child("a", "UnfitPromChild"), child("b"))
    front.metrics.observe({**own(a={"queries": 1}), "a": {"loads": 1}, "b": {"loads": 2}})
    assert front.value("vllm:kv_connector_queries_total", connector="a") == 1
    assert front.value("vllm:fake_loads_total", kind="k", connector="b") == 2


@pytest.mark.parametrize(
    "payload",
    [
        None,
        {"a": None},
        {"*": None},
        {"*": {"counters": {"a": {"queries": -5, "errors": {"x": -1}}}}},
        {"*": {"counters": {"a": {"queries": float("nan")}}}},
        {"*": {"counters": {"unknown": {"queries": 1}}}},
        {"*": {"counters": {"a": {"gauges": {"unknown": 1}}}}},
        {"a": {"loads": -1}},
        {"a": {}},
        {"unknown": {"loads": 1}},
    ],
)
def test_no_payload_can_raise_into_the_metrics_loop(payload):
    front = Front(child("a"))
    front.metrics.observe(payload)
    front.metrics.observe(own(a={"queries": 1}), engine_idx=99)


def test_an_amount_that_cannot_be_counted_does_not_hide_the_others():
    front = Front(child("a"))
    front.metrics.observe(own(a={"queries": -5, "asked_tokens": "x", "chosen": 1, "errors": {"x": -1}}))
    assert front.value("vllm:kv_connector_chosen_total", connector="a") == 1


@pytest.mark.parametrize("error", FAULTS)
def test_one_childs_bad_payload_does_not_hide_another_childs(error, monkeypatch):
    monkeypatch.setattr(FakeStats, "error", error)
    front = Front(child("a"), child("b"))
    front.metrics.observe({"a": {"loads": -1}, "b": {"loads": 2}})
    assert front.value("vllm:fake_loads_total", kind="k", connector="b") == 2


def test_named_labels_are_filled_in_too():
    registry = CollectorRegistry()
    metric = Counter("x", "d", ["model_name", "connector"], registry=registry)
    stats._ChildMetric(metric, "a").labels(model_name="m").inc()
    assert registry.get_sample_value("x_total", {"model_name": "m", "connector": "a"}) == 1
    assert stats._ChildMetric(metric, "a")._type == "counter"


def test_metrics_of_one_name_and_different_labels_are_not_mixed():
    registry = stats._Registry({Counter: lambda **options: Counter(**options, registry=CollectorRegistry())})
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
