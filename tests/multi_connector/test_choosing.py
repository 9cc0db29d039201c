# SPDX-License-Identifier: Apache-2.0
"""What the MultiConnector makes of weights, loads and steps as requests come."""

from types import SimpleNamespace

import pytest
from vllm.v1.outputs import KVConnectorOutput

from tests.multi_connector.fakes import request
from tests.multi_connector.lockstep import admit, answering, reported


def plan(connector, tokens, drafts=()):
    connector.build_connector_meta(
        SimpleNamespace(
            total_num_scheduled_tokens=tokens,
            num_scheduled_tokens={"r": tokens} if tokens else {},
            scheduled_spec_decode_tokens={"r": list(drafts)} if drafts else {},
            preempted_req_ids=frozenset(),
        )
    )


def answered(connector, seconds, output=None):
    """vLLM takes the answer to its oldest step; ``output`` is the connector's part of it, where there is one."""
    connector._scheduler._clock.now += seconds
    if output is not None:
        connector.update_connector_output(output)
    connector.take_events()


def measured(tokens_a_second, drafts=()):
    """A MultiConnector whose first child offers 500 tokens, after three steps of a second that computed prompts."""
    connector = answering(500, 0, weights=[None, None])
    for _ in range(3):
        plan(connector, tokens_a_second, drafts)
        answered(connector, 1.0, KVConnectorOutput())
    return connector


def serve(connector, name):
    """A request's way: looked up, allocated, loaded in half a second, finished. Returns the tokens it loaded."""
    tokens = admit(connector, name)
    connector._scheduler._clock.now += 0.5
    if tokens:
        reported(connector, name)
    connector.request_finished_all_groups(request(name), ([],))
    return tokens


def test_the_gauge_of_a_number_is_that_number_and_by_weight_zero_nobody_is_counted_as_too_slow():
    connector = answering(100, 100, weights=[0.25, 0])
    admit(connector)
    assert [one.tally.gauges["load_weight"] for one in connector._children] == [0.25, 0.0]
    assert connector._children[1].tally.total("too_slow") == 0


def test_by_weight_zero_measured_a_child_is_counted_as_too_slow_and_tried_now_and_then():
    connector = measured(4000)  # 0.25 ms a token: what it offers takes 0.125 s to compute, and 0.5 s to load
    loaded = [serve(connector, f"r{number}") for number in range(400)]
    assert loaded[:3] == [500] * 3  # until its loads are believed
    tried = loaded[3:].count(500)
    assert 0 < tried < 10
    tally = connector._children[0].tally
    assert tally.total("trials") == tried
    assert tally.total("too_slow") == loaded.count(0)
    assert tally.total("chosen") == 3 + tried
    assert tally.gauges["load_weight"] == 0
    assert "load_weight" not in connector._children[1].tally.gauges


def test_a_step_that_verifies_drafts_is_no_prefill():
    """Three for one request: of four tokens it computes one."""
    assert measured(4)._scheduler.choice.prefill.seconds_per_token == 0.25
    verified = measured(4, drafts=(1, 2, 3))._scheduler
    assert verified.choice.prefill.seconds_per_token is None
    assert verified._step_times.one_more_s == 1.0


@pytest.mark.parametrize("answer", [None, KVConnectorOutput(), KVConnectorOutput(finished_sending={"r"})])
def test_steps_without_tokens_leave_their_neighbours_their_times(answer):
    """As with asynchronous scheduling: a step is planned before the one before it is answered. One rank says nothing
    of a step without tokens unless it has news, several always answer."""
    connector = answering(500, 0, weights=[None, None])
    for _ in range(3):
        plan(connector, 0)
        plan(connector, 1000)
        answered(connector, 0.001, answer)
        plan(connector, 1)
        answered(connector, 1.0, KVConnectorOutput())
        answered(connector, 0.01, KVConnectorOutput())
    assert connector._scheduler.choice.prefill.seconds_per_token == pytest.approx(0.001)
    assert connector._scheduler._step_times.one_more_s == pytest.approx(0.01)


def test_requests_that_wait_for_a_stalled_child_keep_others_from_it():
    connector = measured(1000)
    for number in range(3):
        admit(connector, f"stalled{number}")
    assert connector.get_num_new_matched_tokens(request("soon"), 0)[0] == 500
    connector._scheduler._clock.now += 60
    assert connector.get_num_new_matched_tokens(request("later"), 0)[0] == 0


def test_a_failed_load_is_measured_as_one_that_saves_nothing():
    connector = measured(1000)
    for number in range(3):
        name = f"r{number}"
        assert admit(connector, name) == 500
        connector._scheduler._clock.now += 0.1
        reported(connector, name, failed={name})
        connector.request_finished_all_groups(request(name), ([],))
    assert connector.get_num_new_matched_tokens(request("next"), 0)[0] == 0


def test_requests_that_wait_make_computing_dearer():
    connector = measured(4000)
    for number in range(5):
        serve(connector, f"r{number}")  # twice too slow, as measured now
    assert connector.get_num_new_matched_tokens(request("alone"), 0)[0] == 0
    connector._scheduler.on_new_request(request("alone"))
    admit(connector, "alone", tokens=0)
    assert connector.get_num_new_matched_tokens(request("alone too"), 0)[0] == 0
    connector._scheduler.on_new_request(request("waits"))
    connector._scheduler.on_new_request(request("waits too"))
    assert connector.get_num_new_matched_tokens(request("alone too"), 0)[0] == 500


@pytest.mark.parametrize(("parameters", "tokens"), [({"do_remote_prefill": True}, 500), ({}, 0)])
def test_a_prompt_that_another_engine_has_computed_is_loaded_whatever_it_takes(parameters, tokens):
    connector = measured(4000)
    for number in range(5):
        serve(connector, f"r{number}")
    asking = request("remote")
    asking.kv_transfer_params = parameters
    assert connector.get_num_new_matched_tokens(asking, 0)[0] == tokens
