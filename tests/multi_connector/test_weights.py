# SPDX-License-Identifier: Apache-2.0
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_overlay.multi_connector.weights import LEVEL_LOADS, LoadTimes, PrefillRate, StepTimes

COMPUTE_S = 0.001
SIZES = [500, 1000, 2000, 4000, 8000, 16000, 32000, 64000]


def after(*loads, prior=0.5):
    """What is known after these loads of (tokens, seconds)."""
    times = LoadTimes(prior)
    for load in loads:
        times.ended(*load, COMPUTE_S)
    return times


def settled(seconds_of, factor=1.0):
    """What is known after many loads of all sizes."""
    return after(*[(tokens, factor * seconds_of(tokens)) for tokens in SIZES * 3])


def line(tokens):
    return 0.5 + 0.0002 * tokens


def test_before_anything_is_measured_a_load_saves_what_its_weight_promises():
    assert after().seconds(1000, COMPUTE_S) == pytest.approx(0.5)


@pytest.mark.parametrize(("slow", "seconds"), [(1, 0.5), (2, 0.5), (3, 30.0)])
def test_three_slow_loads_are_believed_and_not_the_first_two(slow, seconds):
    assert after(*[(1000, 30.0)] * slow).seconds(1000, COMPUTE_S) == pytest.approx(seconds)


@given(st.floats(0, 10), st.floats(1e-6, 0.1), st.integers(100, 100_000))
def test_loads_on_a_line_give_the_line(fixed, each, tokens):
    found = settled(lambda size: fixed + each * size)
    assert found.seconds(tokens, COMPUTE_S) == pytest.approx(fixed + each * tokens, rel=1e-3)


@given(st.floats(0.01, 10), st.sampled_from(SIZES))
def test_loads_that_take_the_same_whatever_their_size_are_known(seconds, tokens):
    assert settled(lambda _: seconds).seconds(tokens, COMPUTE_S) == pytest.approx(seconds, rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 200_000), st.floats(0, 1000)), max_size=60), st.integers(1, 200_000))
@example([*[(1, 0.0)] * 3, *[(1, 1.0)] * 3, (2, 1.0), (2, 2.225073858507e-311)], 1)
def test_no_measurement_makes_time_run_backwards_or_fall_with_the_tokens(loads, tokens):
    times = after(*loads)
    assert 0 <= times.seconds(tokens, COMPUTE_S) <= times.seconds(tokens + 1, COMPUTE_S)


@given(st.integers(0, 10_000))
def test_two_slow_loads_in_a_row_change_nothing_much(seed):
    source = random.Random(seed)
    noisy = [(tokens, line(tokens) * source.lognormvariate(0, 0.1)) for tokens in SIZES * 3]
    times = after(*noisy, (4000, 60.0), (4000, 60.0))
    assert times.seconds(4000, COMPUTE_S) < 2 * line(4000)


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_tier_that_changes_is_known_after_three_loads(factor):
    times = settled(line)
    for tokens in (1000, 16000, 4000):
        times.ended(tokens, factor * line(tokens), COMPUTE_S)
    assert times.seconds(8000, COMPUTE_S) == pytest.approx(factor * line(8000), rel=0.05)


def test_its_line_is_that_of_the_new_loads_alone():
    times = settled(line, factor=10.0)
    for tokens in SIZES:
        times.ended(tokens, 0.01 + 0.0001 * tokens, COMPUTE_S)
    for tokens in (500, 64000):
        assert times.seconds(tokens, COMPUTE_S) == pytest.approx(0.01 + 0.0001 * tokens, rel=0.05)


def test_one_fast_load_is_believed_after_many_lost_offers():
    times = settled(line, factor=50.0)
    times.ended(4000, line(4000), COMPUTE_S)
    assert times.seconds(4000, COMPUTE_S) == pytest.approx(50 * line(4000), rel=0.01)
    for _ in range(100):
        times.lost()
    times.ended(4000, line(4000), COMPUTE_S)
    assert times.seconds(4000, COMPUTE_S) == pytest.approx(line(4000), rel=0.01)


def test_one_slow_load_is_not_even_then():
    times = settled(line)
    for _ in range(100):
        times.lost()
    times.ended(4000, 50 * line(4000), COMPUTE_S)
    assert times.seconds(4000, COMPUTE_S) == pytest.approx(line(4000), rel=0.01)


def test_loads_under_way_for_longer_than_expected_count_as_that_slow():
    times = settled(line)
    times.under_way([(4000, 60.0)] * (LEVEL_LOADS // 2))
    assert times.seconds(4000, COMPUTE_S) == pytest.approx(line(4000), rel=0.01)
    times.under_way([(4000, 60.0)] * (LEVEL_LOADS // 2 + 1))
    assert times.seconds(4000, COMPUTE_S) == pytest.approx(60.0)
    times.under_way([(4000, 0.1)] * LEVEL_LOADS)
    assert times.seconds(4000, COMPUTE_S) == pytest.approx(line(4000), rel=0.01)


def test_loads_may_end_before_anybody_knows_what_computing_takes():
    times = LoadTimes(0.5)
    for _ in range(LEVEL_LOADS):
        times.ended(1000, 0.25, None)
    assert times.seconds(1000, COMPUTE_S) == pytest.approx(0.25)


# What computing takes.

FAST, LARGE, SMALL = (1000, 1.0), [(8192, 8.192)] * 3, [(50, 0.5)] * 100


@pytest.mark.parametrize(
    ("steps", "seconds_per_token"),
    [
        ([FAST] * 2, None),
        ([FAST] * 3, 0.001),
        ([(1000, 60.0), FAST, FAST], 0.001),
        ([*LARGE, *SMALL], 0.001),
        ([*SMALL, *LARGE * 3], 0.001),
        ([*[FAST] * 50, *[(1000, 2.0)] * 9], 0.002),
        ([(1000, 0.0), FAST, FAST], None),
    ],
    ids=["two", "three", "one slow", "small last", "small first", "the last sixteen decide", "no time"],
)
def test_computing_takes_what_the_last_large_steps_took(steps, seconds_per_token):
    rate = PrefillRate()
    for step in steps:
        rate.step_ended(*step)
    assert rate.seconds_per_token == (None if seconds_per_token is None else pytest.approx(seconds_per_token))


def test_one_more_step_takes_what_the_last_decode_steps_took():
    times, now = StepTimes(), 0.0
    for tokens, seconds in [(4, 0.03), (2000, 0.2), (4, 0.03), (4, 0.9)]:
        assert times.one_more_s == 0.0
        times.planned(tokens, 4, now)
        now += seconds
        assert times.ended(now) == (None if tokens == 4 else (2000, pytest.approx(seconds)))
    assert times.one_more_s == pytest.approx(0.03)
