# SPDX-License-Identifier: Apache-2.0
"""Lookups: who is chosen, who is waited for, where the prefill stops, and what is counted."""

import math

import pytest
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.multi_connector.fakes import FAULTS, Boom, blocks, child, multi, request, scheduler_output
from tests.multi_connector.lockstep import admit, allocated, answering, answers_it, by_label, reported, tally_of
from vllm_overlay.multi_connector import lookup


def test_the_best_weighted_offer_is_chosen_and_all_are_asked_in_one_call():
    connector = answering(100, 90, 16, weights=[1.0, 2.0, 1.0])
    assert connector.get_num_new_matched_tokens(request(), 32) == (90, True)
    assert [len(fake.called("get_num_new_matched_tokens")) for fake in connector.sub_connectors] == [1, 1, 1]


def test_losers_get_the_real_blocks_and_no_tokens():
    connector = answering(100, 90)
    r, b = request(), blocks(1, 2)
    connector.get_num_new_matched_tokens(r, 0)
    connector.update_state_after_alloc(r, b, 100)
    assert [fake.called("update_state_after_alloc") for fake in connector.sub_connectors] == [
        [[r, b, 100]],
        [[r, b, 0]],
    ]


def test_what_the_scheduler_does_not_take_is_loaded_by_nobody():
    connector = answering(100)
    admit(connector, tokens=0)
    assert allocated(connector.sub_connectors[0]) == [0]
    assert (tally_of(connector).total("offered_tokens"), tally_of(connector).total("chosen")) == (100, 0)
    assert connector.build_connector_meta(scheduler_output()).loads == {}


def test_the_synchronous_flag_is_the_chosen_ones_and_a_hit_of_nothing_is_never_asynchronous():
    assert answering((16, True), (64, False)).get_num_new_matched_tokens(request(), 0) == (64, False)
    assert answering((0, True)).get_num_new_matched_tokens(request(), 0) == (0, False)


def test_the_chosen_child_says_what_it_loads_and_from_where():
    connector = answering(16, 64)
    sources = {CacheHitSource.DISK: 64}
    connector.sub_connectors[1].answers |= {
        "get_loaded_kv_cache_group_ids": (1, 2),
        "get_external_cache_hit_sources": sources,
    }
    connector.get_num_new_matched_tokens(request(), 0)
    assert connector.get_loaded_kv_cache_group_ids(request()) == (1, 2)
    assert connector.get_external_cache_hit_sources(request(), 64) is sources


@pytest.mark.parametrize("chosen, completes", [((64, 16), True), ((16, 64), False), ((16, 0), True), ((0, 16), False)])
def test_whether_local_attention_is_completed_is_said_by_the_child_that_loads(chosen, completes):
    connector = answering(*chosen)
    connector.sub_connectors[0].answers["completes_local_attention"] = True
    connector.get_num_new_matched_tokens(request(), 0)
    assert connector.completes_local_attention(request()) is completes


def test_without_a_choice_the_interfaces_defaults_hold():
    connector = answering(0)
    assert connector.completes_local_attention(request()) is False
    assert connector.get_loaded_kv_cache_group_ids(request()) == (7,)
    assert connector.get_external_cache_hit_sources(request(), 8) == {CacheHitSource.EXTERNAL_UNSPECIFIED: 8}
    assert connector.get_external_cache_hit_sources(request(), 0) == {}


def test_a_child_still_looking_that_could_win_is_waited_for_until_the_deadline():
    connector = answering(16, None, lookup_timeout_ms=50)
    for passed_s in (0.0, 0.04):
        connector._scheduler._clock.now = 100.0 + passed_s
        assert connector.get_num_new_matched_tokens(request(), 0) == (None, False)
    connector._scheduler._clock.now = 100.051
    assert connector.get_num_new_matched_tokens(request(), 0) == (16, True)
    assert answering(None, lookup_timeout_ms=0).get_num_new_matched_tokens(request(), 0) == (0, False)


def test_each_decision_has_a_line_at_debug_level(monkeypatch):
    lines = []
    monkeypatch.setattr(lookup.logger, "isEnabledFor", lambda level: True)
    monkeypatch.setattr(lookup.logger, "debug", lambda message, *args: lines.append(message % args))
    weights = {"a": 1.0, "b": 0.5, "c": 1.0, "d": 1.0}
    children = [child(name, weight=weight, load=name != "c") for name, weight in weights.items()]
    connector = answering(100, 160, 64, None, children=children, lookup_timeout_ms=50)
    for passed_s in (0.0, 0.051):
        connector._scheduler._clock.now = 100.0 + passed_s
        connector.get_num_new_matched_tokens(request("r"), 16)
    connector = answering(0, 0)
    connector._children[1].isolated = True
    connector.get_num_new_matched_tokens(request("q"), 0)
    offers = "a 100 (worth 100), b 160 (worth 80), c 64 (ignored: load_off), d is looking"
    assert lines == [
        f"request r: 984 tokens are not on the device; {offers}; asks again",
        f"request r: 984 tokens are not on the device; {offers}; chosen: a",
        "request q: 1000 tokens are not on the device; a nothing, b is out of service; chosen: none",
    ]


def reading(*answers, **settings):
    """``answering``, where b is a child that may read while it looks. Computing is not measured yet."""
    connector = answering(*answers, **settings)
    connector.sub_connectors[1].reads_while_looking = True
    return connector


def finds_after(connector, seconds):
    connector._scheduler._clock.now = 100.0 + seconds
    return connector.get_num_new_matched_tokens(request(), 0)[0]


def test_a_child_that_may_be_reading_is_waited_for_as_long_as_what_it_could_spare_takes_to_compute():
    connector = reading(16, None, weights=[1.0, 0.5])
    for _ in range(3):
        connector._scheduler.choice.prefill.step_ended(1000, 4.0)
    assert [finds_after(connector, seconds) for seconds in (0.0, 1.9, 2.1)] == [None, None, 16]


def test_until_computing_is_measured_it_is_waited_for_as_long_as_a_load_may_take():
    connector = reading(16, None, isolate_after_s=5.0)
    assert [finds_after(connector, seconds) for seconds in (0.0, 4.9, 5.1)] == [None, None, 16]


def test_what_it_could_spare_is_no_reason_to_wait_longer_than_for_a_load_or_shorter_than_for_others():
    connector = reading(16, None, isolate_after_s=5.0, lookup_timeout_ms=2000)
    for seconds, last in ((1000.0, 5.0), (0.001, 2.0)):
        for _ in range(16):
            connector._scheduler.choice.prefill.step_ended(1000, seconds)
        assert [finds_after(connector, after) for after in (0.0, last - 0.1, last + 0.1)] == [None, None, 16]
        admit(connector)


def test_others_that_are_still_looking_are_not_waited_for_longer_beside_it():
    connector = reading(16, None, None)
    assert [finds_after(connector, seconds) for seconds in (0.0, 1.0)] == [None, None]
    answers_it(connector.sub_connectors[1], 0)
    assert finds_after(connector, 1.1) == 16


def test_the_deadline_is_each_requests_own():
    connector = answering(16, None, lookup_timeout_ms=50)
    connector.get_num_new_matched_tokens(request("first"), 0)
    connector._scheduler._clock.now += 1
    assert connector.get_num_new_matched_tokens(request("second"), 0) == (None, False)


def test_a_request_that_found_no_blocks_does_not_wait_again_before_it_was_admitted():
    connector = answering(16, None)
    connector.get_num_new_matched_tokens(request(), 0)
    connector._scheduler._clock.now += 1
    assert [connector.get_num_new_matched_tokens(request(), 0)[0] for _ in range(2)] == [16, 16]
    admit(connector)
    assert connector.get_num_new_matched_tokens(request(), 0) == (None, False)  # after a preemption, say


@pytest.mark.parametrize("answer", [-1, 1001, 10**30, 16.0, math.nan, "16", True, [1], object()])
def test_an_impossible_answer_is_taken_as_nothing_and_counted(answer):
    connector = answering(answer, 16)
    assert connector.get_num_new_matched_tokens(request(num_tokens=1000), 0) == (16, True)
    assert tally_of(connector).total("invalid_answers") == 1


class Raising:
    """A number that raises when it is asked for its value."""

    def __init__(self, error):
        self._error = error

    def __index__(self):
        raise self._error


@pytest.mark.parametrize("error", [*FAULTS, TypeError])
def test_an_answer_that_raises_is_taken_as_nothing(error):
    connector = answering(Raising(error), 16)
    assert connector.get_num_new_matched_tokens(request(), 0) == (16, True)
    tally = tally_of(connector)
    assert (tally.total("errors"), tally.total("invalid_answers")) == ((0, 1) if error is TypeError else (1, 0))


@pytest.mark.parametrize("answer", [None, 5, (1, 2, 3)])
def test_an_answer_that_is_no_pair_is_taken_as_nothing(answer):
    connector = answering(0, 16)
    connector.sub_connectors[0].answers["get_num_new_matched_tokens"] = lambda *args: answer
    assert connector.get_num_new_matched_tokens(request(), 0) == (16, True)
    assert by_label(tally_of(connector), "errors") == {"get_num_new_matched_tokens": 1}


@pytest.mark.parametrize("offer, recurrent, taken", [(900, False, 900), (900, True, 0), (899, True, 899)])
def test_the_whole_prompt_is_a_hit_only_where_no_state_must_rewind(offer, recurrent, taken):
    connector = answering(offer, recurrent=recurrent)
    assert connector.get_num_new_matched_tokens(request(num_tokens=1000), 100)[0] == taken


def test_a_child_that_failed_a_request_too_often_is_not_chosen_for_it_again():
    connector = multi(child("a", max_load_attempts=2), child("b"))
    for fake, tokens in zip(connector.sub_connectors, (100, 16), strict=True):
        fake.answers["get_num_new_matched_tokens"] = (tokens, True)
    r = request()
    for expected in (100, 100, 16, 16, 16, 0):  # the other child has its own number, which is 3
        assert connector.get_num_new_matched_tokens(r, 0)[0] == expected
        connector.update_state_after_alloc(r, blocks(1), expected)
        reported(connector, failed="r")
    assert connector.get_num_new_matched_tokens(request("another"), 0)[0] == 100
    assert ignored(connector) == ({"attempts": 4}, {"attempts": 400})


def test_a_decision_is_made_anew_at_every_lookup():
    connector = answering(100, 16)
    connector.get_num_new_matched_tokens(request(), 0)
    answers_it(connector.sub_connectors[0], 0)
    assert admit(connector) == 16
    assert [allocated(fake) for fake in connector.sub_connectors] == [[0], [16]]


# Junctions.


def junction_setter(tokens, junction):
    def answer(r, num_computed_tokens):
        r.seen.append(r.shared_prefix_boundary)
        if junction is not None:
            r.shared_prefix_boundary = junction
        return tokens, True

    return answer


def junction_after(*answers, schedulers=64):
    connector = answering(*[0] * len(answers))
    for fake, (tokens, junction) in zip(connector.sub_connectors, answers, strict=True):
        fake.answers["get_num_new_matched_tokens"] = junction_setter(tokens, junction)
    r = request(junction=schedulers)
    r.seen = []
    connector.get_num_new_matched_tokens(r, 0)
    assert r.seen == [schedulers] * len(answers)
    return r.shared_prefix_boundary


@pytest.mark.parametrize(
    ("answers", "junction"),
    [
        ([(128, 512), (100, 256)], 512),
        ([(128, 100), (0, 128)], 64),  # behind the chosen hit
        ([(128, 512), (None, 600)], 64),  # one is waited for
        ([(0, None), (0, None)], 64),
    ],
)
def test_every_child_starts_from_the_schedulers_junction_and_the_furthest_useful_one_wins(answers, junction):
    assert junction_after(*answers) == junction


def test_a_raising_childs_junction_does_not_count():
    connector = answering(0, 0)

    def answer(r, num_computed_tokens):
        r.shared_prefix_boundary = 512
        raise Boom

    connector.sub_connectors[1].answers["get_num_new_matched_tokens"] = answer
    r = request(junction=64)
    connector.get_num_new_matched_tokens(r, 0)
    assert r.shared_prefix_boundary == 64


# Counting.


def test_a_lookup_is_counted_once_at_admission_however_often_it_is_made():
    connector = answering(100, 90, 0)
    for _ in range(5):
        connector.get_num_new_matched_tokens(request(num_tokens=1000), 200)
    connector.update_state_after_alloc(request(), blocks(1), 100)
    connector.update_state_after_alloc(request(), blocks(1), 0)  # vLLM calls again when the load is done
    counted = ("queries", "asked_tokens", "offered_tokens", "chosen", "outbid", "outbid_tokens")
    assert [tuple(tally_of(connector, name).total(one) for one in counted) for name in "abc"] == [
        (1, 800, 100, 1, 0, 0),
        (1, 800, 90, 0, 1, 90),
        (1, 800, 0, 0, 0, 0),
    ]


def test_the_wait_is_counted_for_the_child_that_was_still_looking():
    connector = answering(16, None)
    connector.get_num_new_matched_tokens(request(), 0)
    connector._scheduler._clock.now += 0.25
    admit(connector)
    assert [tally_of(connector, name).total("lookup_wait_seconds") for name in "ab"] == [0, 0.25]


@pytest.mark.parametrize("failed", ["", "r"])
def test_load_seconds_run_from_allocation_to_the_completion_of_a_good_load(failed):
    connector = answering(16)
    admit(connector)
    connector._scheduler._clock.now += 0.5
    reported(connector, failed=failed)
    found = tally_of(connector)
    if failed:
        assert (found.total("failed_loads"), found.total("loaded_tokens")) == (1, 0)
        assert "load_seconds" not in found.histograms
    else:
        seconds = found.histograms["load_seconds"]
        assert (seconds.count, seconds.sum, found.total("loaded_tokens")) == (1, 0.5, 16)


# A tier can be measured before it is used: what it would have brought is counted, by the switch that says no.


def two(answer, **settings):
    """A child with these settings and this answer, and one that has nothing."""
    return answering(answer, 0, children=(child("a", **settings), child("b")))


def ignored(connector, name="a"):
    found = tally_of(connector, name)
    return by_label(found, "ignored_offers"), by_label(found, "ignored_offer_tokens")


@pytest.mark.parametrize(
    ("answer", "settings", "loaded", "reason"),
    [
        (64, {"load": False}, 0, "load_off"),
        (64, {"min_tokens": 65}, 0, "min_tokens"),
        (64, {"load": False, "min_tokens": 65}, 0, "load_off"),
        (64, {"min_tokens": 64}, 64, ""),
        (0, {"load": False}, 0, ""),
        (None, {"load": False}, 0, ""),
    ],
)
def test_what_a_switch_leaves_out_is_counted_once_at_admission_in_requests_and_tokens(answer, settings, loaded, reason):
    connector = two(answer, **settings)
    for _ in range(5):
        connector.get_num_new_matched_tokens(request("first"), 0)
    assert ignored(connector) == ({}, {})
    assert admit(connector, "first") == admit(connector, "second") == loaded
    connector.update_state_after_alloc(request("first"), blocks(1), 0)
    assert ignored(connector) == (({reason: 2}, {reason: 128}) if reason else ({}, {}))
    assert ignored(connector, "b") == ({}, {})
    if reason:
        found = tally_of(connector)
        assert [found.total(one) for one in ("queries", "offered_tokens", "outbid", "too_slow")] == [2, 0, 0, 0]


def test_a_child_that_gets_no_blocks_of_a_request_any_more_is_ignored():
    connector = two(64, store=False, load_weight=0.5)
    answers_it(connector.sub_connectors[1], 64)
    assert admit(connector) == 64  # from the other
    reported(connector, failed="r")
    answers_it(connector.sub_connectors[1], 0)
    assert admit(connector) == 0
    assert allocated(connector.sub_connectors[0]) == []
    assert ignored(connector) == ({"withheld": 1}, {"withheld": 64})
