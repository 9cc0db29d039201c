# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.outputs import KVConnectorOutput

from tests.multi_connector.fakes import blocks, child, multi, request
from vllm_overlay.multi_connector.cost_model import ENOUGH, Line, LoadCost
from vllm_overlay.multi_connector.selection import Offer, decide
from vllm_overlay.multi_connector.selection_rules.cost import Cost


def fitted(*points):
    line = Line()
    for tokens, seconds in points:
        line.add(tokens, seconds)
    return line.coefficients()


@given(st.floats(0, 10), st.floats(0, 0.1), st.lists(st.integers(1, 100_000), min_size=2, max_size=200, unique=True))
def test_points_on_a_line_give_the_line(a, b, sizes):
    line = Line()
    for tokens in sizes:
        line.add(tokens, a + b * tokens)
    for tokens in (min(sizes), max(sizes)):
        assert line.seconds(tokens) == pytest.approx(a + b * tokens, rel=1e-3, abs=1e-3)


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 100)), max_size=50))
def test_no_measurement_makes_time_run_backwards(points):
    a, b = fitted(*points)
    assert a >= 0 and b >= 0


def test_measurements_of_one_size_are_a_rate():
    assert fitted((1000, 0.5), (1000, 0.5)) == (0.0, pytest.approx(0.0005))


def test_what_was_measured_last_counts_most():
    line = Line()
    for _ in range(300):
        line.add(1000, 0.1)
    for _ in range(300):
        line.add(1000, 1.0)
    assert line.seconds(1000) == pytest.approx(1.0, rel=0.01)


def test_a_child_is_believed_by_its_weight_until_it_has_been_measured():
    cost = LoadCost(promise=0.25)
    for _ in range(ENOUGH - 1):
        cost.measured(1000, 9.0)
    assert cost.saved_s(1000, prefill_s=2.0) == 0.5
    cost.measured(1000, 9.0)
    assert cost.saved_s(1000, prefill_s=2.0) == pytest.approx(-7.0)


def test_a_child_that_is_too_slow_is_tried_again_some_time():
    cost = LoadCost(promise=1.0)
    for _ in range(ENOUGH):
        cost.measured(1000, 4.0)
    refusals = 0
    while cost.saved_s(1000, prefill_s=2.0) <= 0 and refusals < 1000:
        cost.lost_to_computing()
        refusals += 1
    assert 60 < refusals < 80
    cost.measured(1000, 4.0)
    assert cost.saved_s(1000, prefill_s=2.0) == pytest.approx(-2.0)


def priced(*lines, per_token=0.001):
    """The rule after as many measurements as it takes: each child's (a, b)."""
    rule = Cost([1.0] * len(lines))
    for tokens in (100, 1000, 2000):
        rule.step_measured(tokens, 0.01 + per_token * tokens)
        for index, (a, b) in enumerate(lines):
            rule.load_measured(index, tokens, a + b * tokens)
    return rule


def winner(rule, *tokens):
    offers = [Offer(number, 1.0, rule.value_of(index)) for index, number in enumerate(tokens)]
    return decide(offers, 10_000, may_wait=False).chosen


def test_a_thousand_fast_tokens_beat_five_thousand_slow_ones():
    assert winner(priced((0.0, 0.0001), (0.0, 0.0009)), 1000, 5000) == 0
    assert winner(priced((0.0, 0.0001), (0.0, 0.0001)), 1000, 5000) == 1


def test_a_load_that_is_slower_than_computing_is_left():
    assert winner(priced((0.0, 0.002)), 5000) is None


def test_a_few_tokens_do_not_pay_for_a_slow_start():
    rule = priced((0.5, 0.0))
    assert winner(rule, 400) is None
    assert winner(rule, 600) == 0


def test_nobody_is_waited_for_who_would_be_too_slow_even_with_all_tokens():
    rule = priced((0.0, 0.0001), (0.0, 0.002))
    offers = [Offer(10, 1.0, rule.value_of(0)), Offer(None, 1.0, rule.value_of(1))]
    assert decide(offers, 10_000, may_wait=True).chosen == 0


def test_before_anything_is_measured_weights_decide():
    rule = Cost([1.0, 0.5, 0.0])
    assert winner(rule, 100, 300, 9000) == 1
    for tokens in (100, 200, 300):
        rule.step_measured(tokens, 0.001 * tokens)
    assert winner(rule, 100, 300, 9000) == 1


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Output:
    """What of a scheduler's output the measuring looks at."""

    preempted_req_ids: frozenset = frozenset()

    def __init__(self, tokens):
        self.total_num_scheduled_tokens = tokens
        self.num_scheduled_tokens = {"r": tokens}


def test_the_connector_learns_from_its_own_steps_and_loads():
    connector = multi(child("slow"), selection="cost")
    scheduler, clock = connector._scheduler, Clock()
    scheduler._clock = clock
    connector.sub_connectors[0].answers["get_num_new_matched_tokens"] = (500, True)
    loaded = []
    for number in range(6):
        connector.build_connector_meta(Output(1000))  # a step that computes 1000 tokens in 1 s
        clock.now += 1.0
        connector.update_connector_output(KVConnectorOutput())
        name = f"r{number}"
        tokens = connector.get_num_new_matched_tokens(request(name), 0)[0]
        connector.update_state_after_alloc(request(name), blocks(1), tokens)
        loaded.append(tokens)
        if tokens:
            connector.build_connector_meta(Output(0))
            clock.now += 5.0  # its load takes 5 s
            connector.update_connector_output(KVConnectorOutput(finished_recving={name}))
        connector.request_finished_all_groups(request(name), ([],))
    assert loaded == [500, 500, 500, 0, 0, 0]
    assert connector._children[0].counters.too_slow == 3
    assert scheduler.rule.rule.prefill_s_per_token == pytest.approx(0.001)
    connector.build_connector_meta(Output(0))
    assert not scheduler.tracked
