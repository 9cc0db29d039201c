# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_overlay.multi_connector.prefill_rate import PrefillRate


def after(*steps):
    rate = PrefillRate()
    for step in steps:
        rate.step_ended(*step)
    return rate.seconds_per_token


def test_nothing_is_known_before_three_steps():
    assert after((1000, 1.0), (1000, 1.0)) is None
    assert after((1000, 1.0), (1000, 1.0), (1000, 1.0)) == pytest.approx(0.001)


def test_one_slow_step_in_three_does_not_count():
    assert after((1000, 60.0), (1000, 1.0), (1000, 1.0)) == pytest.approx(0.001)


def test_small_steps_do_not_count_however_many():
    large, small = [(8192, 8.192)] * 3, [(50, 0.5)] * 100
    assert after(*large, *small) == pytest.approx(0.001)
    assert after(*small, *large, *large, *large) == pytest.approx(0.001)


def test_the_last_sixteen_steps_decide():
    assert after(*[(1000, 1.0)] * 50, *[(1000, 2.0)] * 9) == pytest.approx(0.002)


def test_a_step_that_took_no_time_says_nothing():
    assert after((1000, 0.0), (1000, 1.0), (1000, 1.0)) is None
