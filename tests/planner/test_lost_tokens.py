# SPDX-License-Identifier: Apache-2.0
"""Each token that a lookup does not restore has one reason: held to what the missing objects would bring."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.test_planner import add, asked, set_view, tiers
from tests.tiers.entries import evict_one
from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.planner import HybridOffloadPlanner, Lookup
from vllm_overlay.tiers.index import PrefixIndex

FULL = Group(0, GroupKind.FULL, 64, 8, 512, True)
WINDOW = Group(1, GroupKind.WINDOW, 64, 8, 512, True, window=100)
STATE = Group(2, GroupKind.RECURRENT, 64, 0, 512, False)
BEYOND = (Reason.NONE, Reason.PROMPT_END, Reason.GRANULARITY, Reason.DRAFTER)
"""What no tier could restore."""


@settings(max_examples=500, deadline=None)
@given(tiers(), st.data())
def test_what_is_lost_and_what_is_offered_are_what_was_asked_for(tier, data):
    geometry, _, known, held = tier
    keys, num_tokens, num_local = asked(data, tier, any_length=True)
    planner = HybridOffloadPlanner(geometry)

    def lookup(names) -> Lookup:
        return planner.lookup(keys, num_tokens, num_local, set_view(known, names))

    found = lookup(held)
    assert found.num_new_tokens + sum(found.lost.values()) == num_tokens - num_local
    assert all(tokens > 0 for tokens in found.lost.values())
    if found.num_new_tokens < num_tokens - num_local:
        assert found.limited_by in found.lost

    def gain(names) -> int:
        return lookup(names).num_new_tokens - found.num_new_tokens

    windows = {name for name in known if name.tag.startswith("w")}
    assert gain({*held, *windows}) == found.lost.get(Reason.WINDOW, 0)
    of_the_tier = sum(tokens for reason, tokens in found.lost.items() if reason not in BEYOND)
    assert gain(known) == of_the_tier


@settings(max_examples=300, deadline=None)
@given(tiers(), st.data())
def test_what_eviction_has_cost_is_what_full_attention_reached_before(tier, data):
    """A tier that had everything and evicted what it does not hold: attention is what whole chunks do not reach.

    That can be a chunk and more where groups have chunks of different sizes.
    """
    geometry, prompts, known, held = tier
    keys = data.draw(st.sampled_from(prompts))
    num_tokens = len(keys) * geometry.match_unit
    planner = HybridOffloadPlanner(geometry)
    view = set_view(known, held)
    lost = planner.lookup(keys, num_tokens, 0, view).lost
    view.evicted = set(known) - set(held)
    remembered = planner.lookup(keys, num_tokens, 0, view).lost
    attention, evicted = (remembered.get(reason, 0) for reason in (Reason.ATTENTION, Reason.EVICTED))
    assert attention + evicted == lost.get(Reason.ATTENTION, 0)
    sizes = [geometry.chunk_size_of(group) for group in geometry.full]
    whole = min([(num_tokens - 1) // size * size for size in sizes], default=num_tokens - 1)
    last, whole = map(geometry.floor_to_restore_point, (num_tokens - 1, whole))
    assert attention <= last - whole
    others = {reason for reason in lost if reason is not Reason.ATTENTION}
    assert all(remembered[reason] == lost[reason] for reason in others)


def lost(
    groups: list[Group], num_tokens: int, covered: int = 0, snapshot: int = 0, chunk: int = 64, lookahead: int = 0
) -> dict[str, int]:
    """What a prompt loses of which a tier has so much attention, and the snapshot of one boundary."""
    geometry = Geometry.build(groups, 16, chunk)
    planner, index = HybridOffloadPlanner(geometry), PrefixIndex(None)
    keys = [bytes([1]) * (n + 1) for n in range(num_tokens // 16 - lookahead)]
    add(index, planner.store_plan(keys, {}, covered) + ([planner.snapshot(keys, snapshot)] if snapshot else []))
    return dict(planner.lookup(keys, num_tokens, 0, index).lost)


@pytest.mark.parametrize(
    ("groups", "num_tokens", "stored", "reasons"),
    [
        ([FULL, STATE], 200, {}, {"attention": 192, "prompt_end": 8}),
        ([FULL, STATE], 200, {"covered": 128}, {"state": 128, "attention": 64, "prompt_end": 8}),
        ([FULL, STATE], 200, {"covered": 128, "snapshot": 64}, {"state": 64, "attention": 64, "prompt_end": 8}),
        # A snapshot beyond the last whole chunk counts as reached.
        ([FULL, STATE], 200, {"covered": 128, "snapshot": 144}, {"attention": 48, "prompt_end": 8}),
        ([FULL], 250, {"covered": 192}, {"granularity": 48, "prompt_end": 10}),
        ([FULL, STATE], 16, {}, {"none": 16}),
        ([FULL, STATE], 17, {}, {"attention": 16, "prompt_end": 1}),
        ([STATE], 200, {}, {"state": 192, "prompt_end": 8}),
        ([WINDOW], 200, {}, {"window": 192, "prompt_end": 8}),
        (
            [FULL, STATE],
            200,
            {"covered": 128, "lookahead": 1},
            {"state": 128, "attention": 48, "drafter": 16, "prompt_end": 8},
        ),
        ([FULL, STATE], 192, {"lookahead": 1}, {"attention": 176, "prompt_end": 16}),
        ([FULL, STATE], 20, {"lookahead": 1}, {"none": 20}),
        ([FULL], 250, {"covered": 192, "lookahead": 2}, {"granularity": 16, "drafter": 32, "prompt_end": 10}),
    ],
)
def test_what_a_prompt_loses_by_reason(groups, num_tokens, stored, reasons) -> None:
    assert lost(groups, num_tokens, **stored) == reasons


def test_attention_that_was_evicted_is_told_from_attention_that_never_came() -> None:
    geometry = Geometry.build([FULL, STATE], 16, 64)
    planner, index = HybridOffloadPlanner(geometry), PrefixIndex(None)
    keys = [bytes([1]) * (n + 1) for n in range(20)]
    stored = planner.store_plan(keys[:16], {}, 256)
    add(index, stored)
    evicted = [evict_one(index), evict_one(index)]
    assert [entry.end_tokens for entry in evicted if entry is not None] == [256, 192]
    reasons = {"state": 128, "evicted": 128, "attention": 48, "prompt_end": 16}
    assert dict(planner.lookup(keys, 320, 0, index).lost) == reasons
    index.drop(stored[0].object_id)  # no eviction: it did not verify, say
    assert dict(planner.lookup(keys, 320, 0, index).lost) == {"attention": 304, "prompt_end": 16}
