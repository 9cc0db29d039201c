# SPDX-License-Identifier: Apache-2.0
from vllm_overlay.common.backoff import Backoff


def test_pauses_double_up_to_the_bound():
    backoff, now, pauses = Backoff(1.0, 5.0), 100.0, []
    for _ in range(5):
        backoff.failed(now)
        pauses.append(backoff.pause_s)
        now += backoff.pause_s
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_it_may_be_tried_only_once_the_pause_is_over():
    backoff = Backoff(1.0, 5.0)
    backoff.failed(100.0)
    assert (backoff.may_try(100.9), backoff.may_try(101.0)) == (False, True)


def test_working_for_the_longest_pause_makes_the_next_failure_a_first_one():
    backoff, now, pauses = Backoff(1.0, 5.0), 100.0, []
    for worked_s in (0.0, 4.9, 5.0, 4.9):
        backoff.succeeded(now)
        now += worked_s
        backoff.failed(now)
        pauses.append(backoff.pause_s)
        now += backoff.pause_s
    assert pauses == [1.0, 2.0, 1.0, 2.0]


def test_a_child_that_fails_for_weeks_has_a_pause_still():
    backoff = Backoff(1.0, 60.0)
    for _ in range(5000):
        backoff.failed(0.0)
    assert backoff.pause_s == 60.0
