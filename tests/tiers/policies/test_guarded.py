# SPDX-License-Identifier: Apache-2.0
"""A policy that raises or lies costs its order, and nothing else."""

import logging
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.logged import logged_by
from tests.tiers.integrity import check_integrity
from tests.tiers.test_index import IndexMachine
from tests.tiers.test_index_cases import chunk
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies import guarded
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.guarded import GuardedPolicy
from vllm_overlay.tiers.policies.learned import LearnedEviction
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed

HOOKS = ("stored", "used", "removed", "add", "discard", "pop")


def failing(policy: EvictionPolicy[Entry], hook: str, after: int) -> EvictionPolicy[Entry]:
    """The policy, one of whose methods raises from some call on, before or after it has done its work."""
    calls, method = count(), getattr(policy, hook)

    def fails(*arguments: Any) -> Any:
        call = next(calls)
        if call > after:
            raise KeyError(hook)
        answer = method(*arguments)
        if call == after:
            raise KeyError(hook)
        return answer

    setattr(policy, hook, fails)
    return policy


class FailingPolicyMachine(IndexMachine):
    """The index holds all its promises while its policy fails."""

    @rule(hook=st.sampled_from(HOOKS), after=st.integers(0, 20))
    def something_will_fail(self, hook, after):
        self.policy._policy = failing(self.policy._policy, hook, after)

    def new_policy(self, geometry: Geometry) -> EvictionPolicy[Entry]:
        policy = LearnedEviction(lambda: 0.0)
        policy.serve(geometry)
        return GuardedPolicy(policy)

    def check_order(self, entry, candidates):
        """Of which policy it is depends on when that failed."""


FailingPolicyMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestIndexWithAPolicyThatFails = FailingPolicyMachine.TestCase


def filled(policy: EvictionPolicy[Entry]) -> PrefixIndex:
    """Ten prompts of one chunk each, of which the first was used last."""
    index = PrefixIndex(100, GuardedPolicy(policy))
    for number in range(10):
        assert index.reserve(chunk(0, name=f"p{number}"), number) is not None
        index.commit(number)
    index.touch([chunk(0, name="p0").object_id])
    return index


@pytest.mark.parametrize("hook", HOOKS)
def test_after_an_error_the_longest_unused_goes_first_and_the_log_says_so_once(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        index = filled(failing(LearnedEviction(lambda: 0.0), hook, 0))
        gone = [entry.object_id.key for entry in index.evict(100)]
    first = gone[:1] if hook == "removed" else []  # it went before anything failed
    by_last_use = [f"p{number}0".encode() for number in (*range(1, 10), 0)]
    assert gone == [*first, *(key for key in by_last_use if key not in first)]
    (record,) = logged_by(guarded, caplog)
    assert "eviction policy LearnedEviction failed" in record.getMessage()
    assert record.exc_info is not None and isinstance(record.exc_info[1], KeyError)


def test_a_policy_that_names_what_may_not_go_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    class Lies(LeastRecentlyUsed[Entry]):
        def pop(self) -> Entry | None:
            found = super().pop()
            return found and found.parents[0]

    index = PrefixIndex(30, GuardedPolicy(Lies()))
    for number in range(3):
        assert index.reserve(chunk(number), number) is not None
        index.commit(number)
    assert [entry.end_tokens for entry in index.evict(30)] == [192, 128, 64]
    check_integrity(index)
    assert "may not be evicted" in str(logged_by(guarded, caplog)[0].exc_info)


def test_what_was_popped_may_not_be_evicted_any_more() -> None:
    policy = GuardedPolicy(failing(LeastRecentlyUsed[int](), "pop", 1))
    policy.add(1, 0, 64)
    policy.add(2, 1, 64)
    assert [policy.pop() for _ in range(3)] == [1, 2, None]
