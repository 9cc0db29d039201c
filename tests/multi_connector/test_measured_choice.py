# SPDX-License-Identifier: Apache-2.0
"""Numbers, measured weights, and trials of children that lose."""

import pytest

from vllm_overlay.multi_connector.choice import SHARE, Choice, best_offer
from vllm_overlay.multi_connector.weights import LoadWeight

AUTO = LoadWeight(0.8, is_measured=True)
ASKED = 10_000
SIZES = (500, 1000, 2000, 4000) * 4
COMPUTE_S = 0.001


def choice_of(*weights, knows_computing=True):
    choice = Choice(weights)
    for _ in range(3 * knows_computing):
        choice.step_ended(2000, 2000 * COMPUTE_S)
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
    loader = choice.decide(offers, ASKED, may_wait=False).chosen
    choice.decided([offer or 0 for offer in offers], ASKED, loader)
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
    assert choice.decide([10, None], ASKED, may_wait=True).chosen == 0
    assert choice.decide([10, None][::-1], ASKED, may_wait=True).wait


def test_two_slow_loads_at_first_lock_nobody_out():
    choice = choice_of(AUTO)
    loads(choice, 0, lambda _: 60.0, sizes=(2000, 2000))
    taken = 0
    for _ in range(200):
        if admit(choice, 2000) == 0:
            taken += 1
            choice.load_ended(0, 2000, 0.2, failed=False)
    assert taken == 200


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


def test_a_trial_is_said_to_be_one():
    choice = measured((0.0, 0.002))
    verdicts = []
    for _ in range(300):
        verdicts.append(choice.decide([2000], ASKED, may_wait=False))
        choice.decided([2000], ASKED, verdicts[-1].chosen)
    assert {verdict.chosen for verdict in verdicts} == {None, 0}
    assert all(verdict.is_trial == (verdict.chosen == 0) for verdict in verdicts)


def test_a_lookup_that_is_repeated_before_admission_spends_no_credit():
    choice = measured((0.0, 0.002))
    while not (verdict := choice.decide([2000], ASKED, may_wait=False)).is_trial:
        choice.decided([2000], ASKED, None)
    assert choice.decide([2000], ASKED, may_wait=False) == verdict


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
        choice.step_ended(2000, 2000 * compute_s)
    assert admit(choice, 128, None) == 0
    choice.about_to_decide(100, (), step_s)
    assert admit(choice, 128, None) is None
    assert admit(choice, 2000, None) == 0
    assert admit(choice, 128, 128) == 1  # a number is the operator's
