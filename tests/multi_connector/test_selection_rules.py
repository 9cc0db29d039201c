# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
from vllm.v1.outputs import KVConnectorOutput

from tests.multi_connector.fake_rules import Fewest, Raising
from tests.multi_connector.fakes import ENDINGS, FAULTS, blocks, child, multi, request
from tests.multi_connector.lockstep import Clock
from vllm_overlay.config import ConfigError
from vllm_overlay.multi_connector.load_times import LoadTimes
from vllm_overlay.multi_connector.load_weight import LoadWeight
from vllm_overlay.multi_connector.selection_rules import guarded
from vllm_overlay.multi_connector.selection_rules.weighted import Weighted

FAKES = "tests.multi_connector.fake_rules"
OURS = 'set it to "weighted"'
IMPORTABLE = f"{OURS}, or to a class that can be"


@pytest.fixture
def lines(monkeypatch):
    found = []
    monkeypatch.setattr(guarded.logger, "error", lambda message, *args, exc_info: found.append(message % args))
    return found


def offering(*tokens, **settings):
    """A MultiConnector whose children a, b offer these tokens, with a clock of its own."""
    connector = multi(**settings)
    connector._scheduler._clock = Clock()
    for fake, number in zip(connector.sub_connectors, tokens, strict=True):
        fake.answers["get_num_new_matched_tokens"] = (number, True)
    return connector


def step(connector, num_tokens=1000):
    """One engine step of a second that computes a prompt."""
    output = SimpleNamespace(
        total_num_scheduled_tokens=num_tokens, num_scheduled_tokens={"r": num_tokens}, preempted_req_ids=frozenset()
    )
    connector.build_connector_meta(output)
    connector._scheduler._clock.now += 1.0
    connector.update_connector_output(KVConnectorOutput())


def serve(connector, name):
    """A request's way: looked up, allocated, loaded in half a second, finished. Returns the tokens it loaded."""
    tokens = connector.get_num_new_matched_tokens(request(name), 0)[0]
    connector.update_state_after_alloc(request(name), blocks(1), tokens)
    connector._scheduler._clock.now += 0.5
    if tokens:
        connector.update_connector_output(KVConnectorOutput(finished_recving={name}))
    connector.request_finished_all_groups(request(name), ([],))
    return tokens


@pytest.mark.parametrize("name, cls", [("weighted", Weighted), (f"{FAKES}:Fewest", Fewest)])
def test_a_rule_is_named_in_settings(name, cls):
    assert type(multi(selection=name)._scheduler.rule.rule) is cls


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "fewest",
            """selection='fewest' is not known: set it to "weighted", or to "module:Class\"""",
        ),
        ("no.such.module:X", f"selection='no.such.module:X' cannot be imported: No module named 'no'; {IMPORTABLE}"),
        (
            f"{FAKES}:Gone",
            f"selection='{FAKES}:Gone' cannot be imported: module '{FAKES}' has no attribute 'Gone'; {IMPORTABLE}",
        ),
        (f"{FAKES}:NoRule", f"selection='{FAKES}:NoRule' is no SelectionRule: name a subclass of it, or {OURS}"),
        (f"{FAKES}:Unfit", f"selection='{FAKES}:Unfit' cannot be started: too heavy; {OURS} instead"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_at_start(name, sentence):
    with pytest.raises(ConfigError) as caught:
        multi(selection=name)
    assert str(caught.value) == sentence


def test_a_rule_by_module_path_chooses_and_hears_what_loads_and_steps_took():
    connector = offering(100, 16, selection=f"{FAKES}:Fewest")
    step(connector)
    assert serve(connector, "first") == 16
    rule = connector._scheduler.rule.rule
    rule.refused = 1
    connector.sub_connectors[0].answers["get_num_new_matched_tokens"] = (0, False)
    assert serve(connector, "second") == 0
    assert rule.load_weights == [LoadWeight(0.8, is_measured=True)] * 2
    assert rule.heard == [
        ("step", 1000, 1.0),
        ("decided", [100, 16], 1000, 1),
        ("load", 1, 16, 0.5, False),
        ("decided", [0, 16], 1000, None),
    ]
    assert connector._children[1].counters.too_slow == 1
    assert connector._children[1].counters.too_slow_tokens == 16


WHERE = ["worth", "garbage", "try_instead", "nobody", "about_to_decide", "load_ended", "step_ended", "decided"]
DECIDES = ("worth", "garbage", "try_instead", "nobody", "about_to_decide")


@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("where", WHERE)
def test_a_rule_that_raises_while_serving_is_replaced_by_weights_and_logged_once(where, error, lines, monkeypatch):
    monkeypatch.setattr(Raising, "where", where)
    monkeypatch.setattr(Raising, "error", error)
    connector = offering(16, 90, selection=f"{FAKES}:Raising")
    first = serve(connector, "first")
    assert first == (90 if where in DECIDES else 16)
    step(connector)
    connector.sub_connectors[0].answers["get_num_new_matched_tokens"] = (0, False)
    serve(connector, "second")
    connector.sub_connectors[0].answers["get_num_new_matched_tokens"] = (16, True)
    assert [serve(connector, name) for name in ("third", "fourth")] == [90, 90]
    step(connector)
    assert lines == [f"selection='{FAKES}:Raising' has failed. From now on tokens x load_weight decide."]
    assert not any(one.isolated for one in connector._children)
    assert not connector._scheduler.tracked


def test_if_the_measuring_itself_raises_what_the_children_promise_decides(lines, monkeypatch):
    def raises(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(LoadTimes, "seconds", raises)
    connector = offering(16, 90)
    for number in range(6):
        step(connector)
        assert serve(connector, f"r{number}") == 90
    assert lines == ["selection='weighted' has failed. From now on tokens x load_weight decide."]


@pytest.mark.parametrize("error", ENDINGS)
def test_a_shutdown_passes_through_a_rule(error, lines, monkeypatch):
    monkeypatch.setattr(Raising, "where", "worth")
    monkeypatch.setattr(Raising, "error", error)
    connector = offering(16, 90, selection=f"{FAKES}:Raising")
    with pytest.raises(error):
        connector.get_num_new_matched_tokens(request(), 0)
    assert not lines


def test_by_weight_a_child_of_weight_zero_is_not_counted_as_too_slow():
    connector = multi(child("a", weight=0.0), child("b"))
    connector.sub_connectors[0].answers["get_num_new_matched_tokens"] = (100, True)
    assert connector.get_num_new_matched_tokens(request(), 0)[0] == 0
    connector.update_state_after_alloc(request(), blocks(1), 0)
    assert connector._children[0].counters.too_slow == 0


def test_by_weight_zero_measured_a_child_is_counted_as_too_slow_and_tried_now_and_then():
    connector = offering(500, 0)
    for _ in range(3):
        step(connector, 4000)  # 0.25 ms a token: what it offers takes 0.125 s to compute, and 0.5 s to load
    loaded = [serve(connector, f"r{number}") for number in range(400)]
    assert loaded[:3] == [500] * 3  # until its loads are believed
    tried = loaded[3:].count(500)
    assert 0 < tried < 10
    counters = connector._children[0].counters
    assert counters.trials == tried
    assert counters.too_slow == loaded.count(0)
    assert counters.chosen == 3 + tried
    assert counters.gauges["load_weight"] == 0
    assert "load_weight" not in connector._children[1].counters.gauges


def test_the_gauge_of_a_number_is_that_number():
    connector = multi(child("a", weight=0.25), child("b", weight=0))
    for fake in connector.sub_connectors:
        fake.answers["get_num_new_matched_tokens"] = (100, True)
    connector.get_num_new_matched_tokens(request(), 0)
    connector.update_state_after_alloc(request(), blocks(1), 100)
    assert [one.counters.gauges["load_weight"] for one in connector._children] == [0.25, 0.0]


def test_requests_that_wait_for_a_stalled_child_keep_others_from_it():
    connector = offering(500, 0)
    for _ in range(3):
        step(connector, 1000)
    for number in range(3):
        name = f"stalled{number}"
        connector.get_num_new_matched_tokens(request(name), 0)
        connector.update_state_after_alloc(request(name), blocks(1), 500)
    assert connector.get_num_new_matched_tokens(request("soon"), 0)[0] == 500
    connector._scheduler._clock.now += 60
    assert connector.get_num_new_matched_tokens(request("later"), 0)[0] == 0


def test_a_failed_load_is_measured_as_one_that_saves_nothing():
    connector = offering(500, 0)
    for _ in range(3):
        step(connector, 1000)
    for number in range(3):
        name = f"r{number}"
        assert connector.get_num_new_matched_tokens(request(name), 0)[0] == 500
        connector.update_state_after_alloc(request(name), blocks(1), 500)
        connector._scheduler._clock.now += 0.1
        output = KVConnectorOutput(finished_recving={name}, failed_recving={name})
        connector.update_connector_output(output)
        connector.request_finished_all_groups(request(name), ([],))
    assert connector.get_num_new_matched_tokens(request("next"), 0)[0] == 0


def test_requests_that_wait_make_computing_dearer():
    connector = offering(500, 0)
    for _ in range(3):
        step(connector, 4000)
    for number in range(5):
        serve(connector, f"r{number}")  # twice too slow, as measured now
    assert connector.get_num_new_matched_tokens(request("alone"), 0)[0] == 0
    connector._scheduler.on_new_request(request("alone"))
    connector.update_state_after_alloc(request("alone"), blocks(1), 0)
    assert connector.get_num_new_matched_tokens(request("alone too"), 0)[0] == 0
    connector._scheduler.on_new_request(request("waits"))
    connector._scheduler.on_new_request(request("waits too"))
    assert connector.get_num_new_matched_tokens(request("alone too"), 0)[0] == 500


@pytest.mark.parametrize(("parameters", "tokens"), [({"do_remote_prefill": True}, 500), ({}, 0)])
def test_a_prompt_that_another_engine_has_computed_is_loaded_whatever_it_takes(parameters, tokens):
    connector = offering(500, 0)
    for _ in range(3):
        step(connector, 4000)
    for number in range(5):
        serve(connector, f"r{number}")
    asking = request("remote")
    asking.kv_transfer_params = parameters
    assert connector.get_num_new_matched_tokens(asking, 0)[0] == tokens
