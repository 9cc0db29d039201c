# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.common.backoff import Backoff
from vllm_overlay.multi_connector.lifecycle import Lifecycle, Phase
from vllm_overlay.multi_connector.metadata import Duty, Order


def test_one_life():
    lifecycle, seen = Lifecycle(Backoff(1.0, 60.0)), []

    def look():
        seen.append((lifecycle.phase, lifecycle.order))

    look()
    lifecycle.isolate(100.0)
    look()
    lifecycle.stopped()
    look()
    assert not lifecycle.may_try(100.5)
    assert lifecycle.may_try(101.0)
    lifecycle.half_open()
    look()
    lifecycle.serve(101.1)
    look()
    assert seen == [
        (Phase.SERVING, Order(0, Duty.SERVE)),
        (Phase.STOPPING, Order(0, Duty.STOP)),
        (Phase.OPEN, Order(0, Duty.STOP)),
        (Phase.HALF_OPEN, Order(1, Duty.STAND_BY)),
        (Phase.SERVING, Order(1, Duty.SERVE)),
    ]


def test_a_failed_attempt_is_stopped_before_the_next_and_waits_longer():
    lifecycle = Lifecycle(Backoff(1.0, 60.0))
    lifecycle.isolate(100.0)
    lifecycle.stopped()
    lifecycle.half_open()
    lifecycle.isolate(101.0)
    assert lifecycle.order == Order(1, Duty.STOP)
    lifecycle.stopped()
    assert not lifecycle.may_try(102.5)
    assert lifecycle.may_try(103.0)


@given(st.lists(st.sampled_from(["isolate", "stopped", "try", "serve"]), max_size=60))
def test_generations_never_go_back_and_nothing_serves_without_being_half_open(events):
    lifecycle, now, lives = Lifecycle(Backoff(1.0, 60.0)), 0.0, []
    for event in events:
        now += 100.0
        if event == "isolate":
            lifecycle.isolate(now)
        elif event == "stopped":
            lifecycle.stopped()
        elif event == "try" and lifecycle.may_try(now):
            lifecycle.half_open()
        elif event == "serve" and lifecycle.phase is Phase.HALF_OPEN:
            lifecycle.serve(now)
        lives.append((lifecycle.generation, lifecycle.order.duty))
    for (before, duty), (after, then) in pairwise(lives):
        assert before <= after <= before + 1
        if duty is Duty.STOP and then is Duty.SERVE:
            raise AssertionError("served without being half open")
        if after > before:
            assert then is Duty.STAND_BY
