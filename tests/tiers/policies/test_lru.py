# SPDX-License-Identifier: Apache-2.0
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "pop"]), st.integers(0, 9), st.integers(0, 5))))
@example([("discard", 0, 0), ("add", 0, 0), ("add", 0, 0), ("add", 0, 0), ("add", 1, 0)])
def test_the_policy_pops_the_longest_unused_and_deepest(steps):
    policy, model = LeastRecentlyUsed[int](), {}
    for verb, item, last_use in steps * 20:
        if verb == "add":
            policy.add(item, last_use, item)
            model[item] = (last_use, -item)
            assert len(policy._heap) <= 2 * len(model) + 64
        elif verb == "discard":
            policy.discard(item)
            model.pop(item, None)
        else:
            oldest = min(model, key=model.__getitem__) if model else None
            assert policy.pop() == oldest
            model.pop(oldest, None)
        assert set(policy._current) == set(model)
