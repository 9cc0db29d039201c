# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.common.backoff import Backoff
from vllm_overlay.multi_connector.lifecycle import Duty, Lifecycle, Order, Phase


def test_one_life():
    service, seen = Lifecycle(Backoff(1.0, 60.0)), []

    def look():
        seen.append((service.phase, service.order))

    look()
    service.isolate(100.0)
    look()
    service.stopped()
    look()
    assert not service.may_try(100.5)
    assert service.may_try(101.0)
    service.begin_trial()
    look()
    service.serve(101.1)
    look()
    assert seen == [
        (Phase.SERVING, Order(0, Duty.SERVE)),
        (Phase.STOPPING, Order(0, Duty.STOP)),
        (Phase.RESTING, Order(0, Duty.STOP)),
        (Phase.ON_TRIAL, Order(1, Duty.STAND_BY)),
        (Phase.SERVING, Order(1, Duty.SERVE)),
    ]


def test_a_failed_trial_is_stopped_before_the_next_and_waits_longer():
    service = Lifecycle(Backoff(1.0, 60.0))
    service.isolate(100.0)
    service.stopped()
    service.begin_trial()
    service.isolate(101.0)
    assert service.order == Order(1, Duty.STOP)
    service.stopped()
    assert not service.may_try(102.5)
    assert service.may_try(103.0)


@given(st.lists(st.sampled_from(["isolate", "stopped", "try", "serve", "trial_failed"]), max_size=60))
def test_generations_never_go_back_and_nothing_serves_without_a_trial(events):
    service, now, lives = Lifecycle(Backoff(1.0, 60.0)), 0.0, []
    for event in events:
        now += 100.0
        if event == "isolate":
            service.isolate(now)
        elif event == "stopped":
            service.stopped()
        elif event == "try" and service.may_try(now):
            service.begin_trial()
        elif event == "trial_failed" and service.phase is Phase.RESTING:
            service.trial_failed(now)
        elif event == "serve" and service.phase is Phase.ON_TRIAL:
            service.serve(now)
        lives.append((service.generation, service.order.duty))
    for (before, duty), (after, then) in pairwise(lives):
        assert before <= after <= before + 1
        if duty is Duty.STOP and then is Duty.SERVE:
            raise AssertionError("served without a trial")
        if after > before:
            assert then is Duty.STAND_BY
