# SPDX-License-Identifier: Apache-2.0
"""The best offer, whom it is worth to wait for, measured weights, and trials of children that lose."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.multi_connector.choice import SHARE, Choice, best_offer, decide
from vllm_overlay.multi_connector.lookup import merge_junctions
from vllm_overlay.multi_connector.validation import is_possible, lookup
from vllm_overlay.multi_connector.weights import LoadWeight

CEILING = 100
tokens = st.none() | st.integers(0, CEILING)
weights = st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e308]) | st.floats(0, 1e6)
offers = st.lists(st.tuples(tokens, weights), max_size=6)
"""(tokens, load_weight) of each child."""


def verdict_of(found, ceiling=CEILING):
    weights = [weight for _, weight in found]
    return decide([number for number, _ in found], lambda child, number: number * weights[child], ceiling)


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
def test_the_best_offer_wins_and_it_waits_exactly_while_the_winner_is_open(found):
    verdict = verdict_of(found)
    winners = {ready_winner(outcome) for outcome in outcomes(found)}
    assert verdict.wait == (len(winners) > 1)
    if not verdict.wait:
        assert winners == {verdict.chosen}


@pytest.mark.parametrize(("pending_first", "waits"), [(True, True), (False, False)])
def test_a_tie_is_waited_for_only_where_order_would_decide_for_the_pending_one(pending_first, waits):
    found = [(None, 1.0), (CEILING, 1.0)]
    assert verdict_of(found if pending_first else found[::-1]).wait == waits


def test_possible_answers_are_tokens():
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


# Numbers, measured weights and trials.

AUTO = LoadWeight(0.8, is_measured=True)
ASKED = 10_000
SIZES = (500, 1000, 2000, 4000) * 4
COMPUTE_S = 0.001


def choice_of(*weights, knows_computing=True):
    choice = Choice(weights)
    for _ in range(3 * knows_computing):
        choice.prefill.step_ended(2000, 2000 * COMPUTE_S)
    return choice


def loads(choice, child, seconds_of, sizes=SIZES):
    for tokens in sizes:
        choice.load_ended(child, tokens, seconds_of(tokens), failed=False)


def measured(*lines):
    """A choice that has measured children of (seconds a load, seconds a token)."""
    choice = choice_of(*[AUTO] * len(lines))
    for child, (fixed, each) in enumerate(lines):
        loads(choice, child, lambda tokens, fixed=fixed, each=each: fixed + each * tokens)
    return choice


def admit(choice, *offers):
    """One request; returns its loader."""
    loader = choice.decide(offers, ASKED).chosen
    choice.decided(offers, ASKED, loader)
    return loader


def test_numbers_are_the_operators_whatever_is_measured():
    choice = choice_of(LoadWeight(1.0), LoadWeight(0.5))
    loads(choice, 0, lambda _: 60.0)
    assert [choice.worth(0, 1000), choice.worth(1, 1000)] == [1000, 500]
    assert [admit(choice, 100, 300) for _ in range(500)] == [1] * 500


def test_a_measured_weight_is_the_share_of_computing_that_the_load_saves():
    choice = measured((0.0, 0.0002))
    assert choice.worth(0, 3000) == pytest.approx(0.8 * 3000)


def test_until_it_is_measured_it_is_what_the_child_promises():
    assert choice_of(AUTO).worth(0, 1000) == pytest.approx(800)
    assert choice_of(AUTO, knows_computing=False).worth(0, 1000) == pytest.approx(800)
    choice = choice_of(AUTO, knows_computing=False)
    loads(choice, 0, lambda _: 60.0)
    assert choice.worth(0, 1000) == pytest.approx(800)


def test_a_thousand_fast_tokens_beat_five_thousand_slow_ones():
    assert admit(measured((0.0, 0.0001), (0.0, 0.0009)), 1000, 5000) == 0
    assert admit(measured((0.0, 0.0001), (0.0, 0.0001)), 1000, 5000) == 1


def test_a_few_tokens_do_not_pay_for_a_slow_start():
    choice = measured((0.5, 0.0))
    assert admit(choice, 400) is None
    assert admit(choice, 600) == 0


def test_nobody_is_waited_for_who_would_be_too_slow_even_with_all_tokens():
    choice = measured((0.0, 0.0001), (0.0, 0.002))
    assert choice.decide([10, None], ASKED).chosen == 0
    assert choice.decide([10, None][::-1], ASKED).wait


def served(choice, number, seconds, tokens=2000):
    """So many requests in a row, of which each load takes ``seconds``; returns which of them were loaded."""
    loaded = []
    for request in range(number):
        if admit(choice, tokens) == 0:
            loaded.append(request)
            choice.load_ended(0, tokens, seconds, failed=False)
    return loaded


def test_a_child_that_loses_is_tried_and_comes_back_once_it_is_fast():
    choice = measured((0.0, 0.0002))
    assert len(served(choice, 50, 8.0)) == 3
    recovered = served(choice, 1000, 0.4)
    # It is 6,000 tokens' worth slower than computing, and each of the requests takes 10,000.
    expected = 6000 / (SHARE * ASKED)
    assert abs(recovered[0] - expected) <= 5 + 50
    assert len(recovered) == 1000 - recovered[0]


@pytest.mark.parametrize("times_slower", [2, 10, 100])
def test_trying_costs_no_more_than_its_share(times_slower):
    seconds, tokens = times_slower * 2.0, 2000
    choice = measured((0.0, 0.001 * times_slower))
    number = 50_000 if times_slower == 100 else 5000
    loaded = served(choice, number, seconds, tokens)
    longer = len(loaded) * (seconds - tokens * COMPUTE_S)
    assert loaded
    assert longer <= SHARE * number * ASKED * COMPUTE_S


def test_a_child_that_another_outbids_is_tried_too():
    choice = measured((0.0, 0.0001), (0.0, 0.0009))
    loaders = []
    for _ in range(300):
        loaders.append(admit(choice, 2000, 2000))
        choice.load_ended(loaders[-1], 2000, 0.05, failed=False)
    assert loaders[0] == 0
    assert 1 in loaders
    assert loaders.count(1) < 300


def test_a_child_that_is_hardly_slower_is_not_tried_before_it_has_lost_often():
    choice = measured((0.0, 0.0001), (0.0, 0.00011))
    assert [admit(choice, 2000, 2000) for _ in range(17)] == [0] * 16 + [1]


def test_a_lookup_that_is_repeated_before_admission_spends_no_credit():
    choice = measured((0.0, 0.002))
    while not (verdict := choice.decide([2000], ASKED)).is_trial:
        choice.decided([2000], ASKED, None)
    assert choice.decide([2000], ASKED) == verdict


def test_numbers_are_never_tried():
    choice = choice_of(LoadWeight(0.0), LoadWeight(0.1), AUTO)
    assert {admit(choice, 2000, 2000, 2000) for _ in range(2000)} == {2}


def test_loads_under_way_belong_to_their_child():
    choice = measured((0.0, 0.0001), (0.0, 0.0001))
    choice.about_to_decide(0, [(0, 1000, 60.0)] * 3)
    assert best_offer([2000, 1000], choice.worth) == 1


def test_computing_also_delays_the_requests_behind():
    choice = measured((0.0, 0.003))
    assert choice.worth(0, 2000) == pytest.approx(-4000)
    choice.about_to_decide(2, ())
    assert choice.worth(0, 2000) == pytest.approx(2000 * (1 - 3 / 7))
    assert admit(choice, 2000) == 0
    choice.about_to_decide(0, ())
    assert admit(choice, 2000) is None


def test_in_a_long_queue_the_most_tokens_load_whatever_they_take():
    choice = measured((0.0, 0.0001), (0.5, 0.003))
    choice.about_to_decide(100, ())
    assert admit(choice, 1000, 1100) == 1
    assert admit(choice, 1000, 1000) == 0


@pytest.mark.parametrize(("compute_s", "step_s"), [(25e-6, 0.005), (100e-6, 0.03)], ids=["tiny model", "large model"])
def test_an_offer_that_spares_less_than_a_step_is_not_taken(compute_s, step_s):
    choice = Choice([AUTO, LoadWeight(0.5)])
    for _ in range(3):
        choice.prefill.step_ended(2000, 2000 * compute_s)
    assert admit(choice, 128, 0) == 0
    choice.about_to_decide(100, (), step_s)
    assert admit(choice, 128, 0) is None
    assert admit(choice, 2000, 0) == 0
    assert admit(choice, 128, 128) == 1  # a number is the operator's
