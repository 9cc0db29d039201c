# SPDX-License-Identifier: Apache-2.0
"""Numbers of each child on their way to the front end, and the few words that vLLM's log line has of them."""

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

from tests.multi_connector.fakes import (
    ENDINGS,
    FAULTS,
    FakeChild,
    FakeStats,
    breaking,
    child,
    multi,
    request,
    vllm_config,
)
from tests.multi_connector.lockstep import Clock, Lockstep
from tests.waiting import until
from vllm_overlay.common.reasons import Reason
from vllm_overlay.metrics import HOOK, MULTI_CONNECTOR, REASON, Kind
from vllm_overlay.multi_connector import MultiConnector
from vllm_overlay.multi_connector import child as child_module
from vllm_overlay.multi_connector.hooks import HOOKS
from vllm_overlay.multi_connector.lifecycle import Phase
from vllm_overlay.multi_connector.stats import MOST_WORDS, MultiStats
from vllm_overlay.tally import ReportTimes, Tally

CLASSES = dict.fromkeys("ab", "tests.multi_connector.fakes:FakeChild")


@pytest.fixture(autouse=True)
def forget_what_was_logged():
    child_module._log_exception_once.cache_clear()


def connector_with_stats(*loads, **settings):
    """It has no requests, so it reports whenever it is asked, but for seconds in hooks."""
    connector = multi(*[child(name) for name in "ab"[: len(loads)]], **settings)
    connector._report_times = ReportTimes(lambda: 0.0)
    for fake, number in zip(connector.sub_connectors, loads, strict=True):
        fake.answers["get_kv_connector_stats"] = lambda number=number: FakeStats(data={"loads": number})
    return connector


def quiet(connector):
    """Once it has reported the levels that it starts with."""
    connector.get_kv_connector_stats()
    return connector


def wire(found):
    """As the scheduler sends it to the front end."""
    packed = msgspec.msgpack.encode(found.to_dict())
    return msgspec.msgpack.decode(packed)


def stats_of(name, tally):
    """Of a child that has none of its own."""
    found = MultiStats()
    found.put(name, tally, None, object())
    return found


def counted(found, name):
    """Our own tally of one child."""
    return found.tallies[name]


def test_while_requests_live_a_report_waits_for_its_time():
    engine, clock = Lockstep(), Clock()
    engine.scheduler.on_new_request(request())
    engine.step()
    side = engine.scheduler
    side._report_times = ReportTimes(clock)
    quiet(side)
    side._children[0].tally.count("errors")
    assert side.get_kv_connector_stats() is None
    clock.now += 0.25
    assert counted(side.get_kv_connector_stats(), "a").total("errors") == 1
    engine.finish("r")
    engine.run(engine.plan())
    side._children[0].tally.count("errors")
    assert counted(side.get_kv_connector_stats(), "a").total("errors") == 1


def test_stats_survive_the_way_to_the_front_end():
    connector = quiet(connector_with_stats(1, 2))
    counted_here = Tally({"chosen": 3, "lookup_wait_seconds": 0.5, "errors:take_events": 2}, gauges={"state": 0})
    counted_here.count("ignored_offers", label=Reason.MIN_TOKENS)
    counted_here.observe("load_seconds", 0.125)
    connector._children[0].tally.add(counted_here)
    sent = connector.get_kv_connector_stats()
    received = MultiConnector.build_kv_connector_stats(wire(sent))
    assert counted(received, "a") == counted_here
    assert received.classes == sent.classes
    for name, loads in (("a", 1), ("b", 2)):
        assert isinstance(received.data[name], FakeStats)
        assert received.data[name].data == {"loads": loads}


def test_workers_and_schedulers_stats_add_up():
    total = quiet(connector_with_stats(1)).get_kv_connector_stats()
    other = quiet(connector_with_stats(10, 5))
    other._children[0].tally.add(Tally({"chosen": 2, "errors:x": 1}))
    total = total.aggregate(other.get_kv_connector_stats()).aggregate(
        stats_of("a", Tally({"chosen": 1, "errors:x": 1, "errors:y": 1}))
    )
    assert (total.data["a"].data, total.data["b"].data) == ({"loads": 11}, {"loads": 5})
    assert counted(total, "a") == Tally({"chosen": 3, "errors:x": 2, "errors:y": 1})


def test_a_child_without_stats_takes_the_first_that_come():
    total = stats_of("a", Tally()).aggregate(connector_with_stats(1).get_kv_connector_stats())
    assert wire(total)["a"] == {"loads": 1}
    assert wire(total)["*"]["classes"] == {"a": CLASSES["a"]}


def test_nothing_is_empty_and_reset_makes_it_so():
    assert MultiConnector.build_kv_connector_stats().is_empty()
    connector = multi()
    until(lambda: connector.get_kv_connector_stats() is None, "a call in the quarter of a second of the one before")
    found = connector_with_stats(1).get_kv_connector_stats()
    assert not found.is_empty()
    found.reset()
    assert found.is_empty()


@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("what", ["aggregate", "reduce", "is_empty", "to_dict"])
def test_a_childs_stats_that_raise_harm_nobody(what, error):
    connector = connector_with_stats(1, 2)
    bad = breaking(FakeStats(data={"loads": 1}), what, error)
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
    ],
)
def test_stats_of_a_child_that_cannot_be_rebuilt_keep_our_tally(classes):
    own = {"tallies": {"a": Tally({"chosen": 1}).to_dict()}, "classes": classes}
    received = MultiConnector.build_kv_connector_stats({"*": own, "a": {"loads": 1}})
    assert counted(received, "a") == Tally({"chosen": 1})
    assert received.data == {}


@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("own", [{"*": {"tallies": {}, "classes": CLASSES}}, {}])
def test_a_class_that_raises_while_its_stats_are_rebuilt_harms_nobody(own, error, monkeypatch):
    def raises(cls, data=None):
        raise error

    monkeypatch.setattr(FakeChild, "build_kv_connector_stats", classmethod(raises))
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class_by_name", lambda name: FakeChild)
    assert MultiConnector.build_kv_connector_stats({**own, "a": {"loads": 1}}).is_empty()


@pytest.mark.parametrize("error", ENDINGS)
def test_a_shutdown_passes_through_stats(error):
    found = connector_with_stats(1, 2).get_kv_connector_stats()
    breaking(found.data["a"], "reduce", error)
    with pytest.raises(error):
        found.reduce()


@pytest.mark.parametrize("error", FAULTS)
def test_stats_that_cannot_be_reset_do_not_stop_the_others_reset(error):
    found = connector_with_stats(1, 2).get_kv_connector_stats()
    breaking(found.data["a"], "reset", error)
    found.reset()
    assert (found.data["a"].data["loads"], found.data["b"].data["loads"]) == (1, 0)


# Words for vLLM's log line.


def payload(tallies, **children):
    """Of a step: our tallies by child, and the children's own stats."""
    return {
        "*": {"tallies": {name: tally.to_dict() for name, tally in tallies.items()}, "classes": CLASSES},
        **children,
    }


def logged(*payloads):
    """The lines of one interval."""
    logging = KVConnectorLogging(vllm_config(child("a"), child("b")).kv_transfer_config)
    for one in payloads:
        logging.observe(one)
    lines = []
    logging.log(log_fn=lambda message, *args: lines.append(message % args))
    return lines


def loading(tokens, *seconds):
    tally = Tally({"queries": 1, "asked_tokens": 8000, "offered_tokens": tokens, "chosen": 1, "loaded_tokens": tokens})
    for one in seconds:
        tally.observe("load_seconds", one)
    return tally


def test_a_line_says_what_each_child_had_and_loaded_and_what_failed():
    bad = Tally(
        {"failed_loads": 1, "errors:take_events": 2, "hangs": 1}, gauges={"state": 2, "quarantined_requests": 5}
    )
    bad.count("ignored_offer_tokens", 64, Reason.LOAD_OFF)
    assert logged(payload({"a": loading(4000, 0.25, 0.5), "b": bad}), payload({"a": loading(1000, 0.25)})) == [
        "KV Transfer metrics: a={'hit': '31.2% of 16000 tokens', 'loaded': '5000 tokens in 1.000 s'}, "
        "b={'ignored tokens': 64, 'failed loads': 1, 'exceptions': 2, 'hangs': 1, 'state': 'open'}"
    ]


def test_a_synchronous_load_has_no_seconds():
    assert MultiConnector.build_kv_connector_stats(payload({"a": loading(16)})).reduce()["a"]["loaded"] == "16 tokens"


def test_an_interval_without_requests_has_no_line():
    idle = Tally({"hook_seconds:wait_for_save": 0.5}, gauges={"state": 0})
    assert logged(payload({"a": idle, "b": idle})) == []


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.SERVING])
def test_a_child_out_of_service_is_in_every_line(phase):
    stats = MultiConnector.build_kv_connector_stats(payload({"a": Tally(gauges={"state": phase.value})}))
    assert stats.reduce() == {"a": {"state": phase.name.lower().replace("_", " ")}}


def test_a_childs_own_words_come_after_ours():
    stats = MultiConnector.build_kv_connector_stats(payload({"a": loading(800)}, a={"loads": 3}, b={"loads": 4}))
    assert list(stats.reduce()["a"].items())[-1] == ("loads", 3)
    assert stats.reduce()["b"] == {"loads": 4}


def test_a_child_with_much_to_say_does_not_make_a_long_line(monkeypatch):
    monkeypatch.setattr(FakeStats, "reduce", lambda self: {f"word {number}": number for number in range(1000)})
    words = MultiConnector.build_kv_connector_stats(payload({"a": loading(800)}, a={"loads": 3})).reduce()["a"]
    assert len(words) == 2 + MOST_WORDS


def test_a_line_is_short_whatever_was_counted():
    many = Tally(gauges={"state": 3, "quarantined_requests": 10**6})
    for field, metric in MULTI_CONNECTOR.items():
        if metric.kind is Kind.COUNTER:
            labels = HOOKS if HOOK in metric.labels else Reason if REASON in metric.labels else [""]
            for label in labels:
                many.count(field, 10**9, label)
    (line,) = logged(payload({"a": many}))
    assert len(line) < 300
