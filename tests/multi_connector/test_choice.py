# SPDX-License-Identifier: Apache-2.0

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.multi_connector.choice import decide
from vllm_overlay.multi_connector.lookup import merge_junctions
from vllm_overlay.multi_connector.validation import is_possible, lookup

CEILING = 100
tokens = st.none() | st.integers(0, CEILING)
weights = st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e308]) | st.floats(0, 1e6)
offers = st.lists(st.tuples(tokens, weights), max_size=6)
"""(tokens, load_weight) of each child."""


def verdict_of(found, ceiling, may_wait):
    weights = [weight for _, weight in found]
    return decide([number for number, _ in found], lambda child, number: number * weights[child], ceiling, may_wait)


def ready_winner(found):
    """The naive rule: walk in order, keep what is strictly better than all before."""
    best, best_score = None, 0.0
    for index, (number, weight) in enumerate(found):
        score = 0.0 if number is None else number * weight
        if score > best_score:
            best, best_score = index, score
    return best


def outcomes(found):
    """Every child still looking, answered with nothing and with everything: the extremes of what can come."""
    if not any(number is None for number, _ in found):
        yield found
        return
    pending = next(i for i, (number, _) in enumerate(found) if number is None)
    for answer in (0, CEILING):
        yield from outcomes([*found[:pending], (answer, found[pending][1]), *found[pending + 1 :]])


@given(offers)
def test_without_time_the_best_ready_offer_wins(found):
    verdict = verdict_of(found, CEILING, may_wait=False)
    assert not verdict.wait
    assert verdict.chosen == ready_winner(found)


@given(offers)
def test_with_time_it_waits_exactly_when_the_winner_is_open(found):
    verdict = verdict_of(found, CEILING, may_wait=True)
    winners = {ready_winner(outcome) for outcome in outcomes(found)}
    assert verdict.wait == (len(winners) > 1)
    if not verdict.wait:
        assert winners == {verdict.chosen}


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([], None),
        ([(0, 1.0), (0, 1.0)], None),
        ([(16, 1.0), (5000, 1.0)], 1),
        ([(1000, 10.0), (5000, 1.0)], 0),
        ([(64, 1.0), (64, 1.0)], 0),
        ([(64, 1.0), (32, 2.0)], 0),
        ([(5000, 0.0), (16, 1.0)], 1),
        ([(5000, 1e308), (16, 1.0)], 0),
        ([(16, 1.0)], 0),
        ([(0, 1.0)] * 8, None),
        ([(100 + i, 1.0) for i in range(8)], 7),
        ([(100, 1.0)] * 8, 0),
    ],
)
def test_decisions_a_user_would_expect(found, chosen):
    assert verdict_of(found, 10_000, may_wait=True).chosen == chosen


@pytest.mark.parametrize(("pending_first", "waits"), [(True, True), (False, False)])
def test_a_tie_is_waited_for_only_where_order_would_decide_for_the_pending_one(pending_first, waits):
    found = [(None, 1.0), (CEILING, 1.0)]
    assert verdict_of(found if pending_first else found[::-1], CEILING, may_wait=True).wait == waits


def test_possible_answers_are_tokens():
    numpy = pytest.importorskip("numpy")
    found = [lookup((answer, 1)) for answer in (0, 100, numpy.int64(16))]
    assert found == [(0, True), (100, True), (16, True)]
    assert all(is_possible(tokens, CEILING) for tokens, _ in found)


def test_junction_that_is_not_a_number_does_not_count():
    assert merge_junctions(64, [None, "512", True, 512.0], resume_tokens=0, num_tokens=1000) == 64


@given(st.integers(0, 1200), st.lists(st.integers(-10, 1200), max_size=5), st.integers(0, 1000))
def test_a_childs_junction_is_taken_only_when_it_helps(schedulers, childrens, resume):
    merged = merge_junctions(schedulers, childrens, resume, 1000)
    useful = sorted(value for value in childrens if resume < value < 1000)
    assert merged == (useful[-1] if useful else schedulers)
