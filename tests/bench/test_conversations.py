# SPDX-License-Identifier: Apache-2.0
"""How the program judges a turn, and counts the snapshots that turns load."""

import pytest

from bench.chat import Turn, Watch
from bench.conversations import judge, summary
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.cpu import CpuTierManager


def turn(tokens: list[int], logprobs: list[float], stored: list[int] | None = None, loaded: list[int] | None = None):
    return Turn([0, 1], tokens, logprobs, 0, stored or [], loaded or [])


def test_a_turn_is_exact_if_tokens_and_logprobs_are_equal():
    uncached = turn([1, 2], [-0.5, -0.25])
    assert judge(turn([1, 2], [-0.5, -0.25]), uncached).is_exact
    assert not judge(turn([1, 2], [-0.5, -0.26]), uncached).is_exact


def test_logprobs_count_up_to_the_first_token_that_differs():
    judged = judge(turn([1, 2, 3], [-0.5, -0.25, -9.0]), turn([1, 4, 3], [-0.5, -0.5, -0.1]))
    assert (judged.has_same_tokens, judged.distance, judged.is_exact) == (False, 0.25, False)


def test_a_snapshot_counts_once_a_chat_however_often_it_is_loaded():
    turns = [turn([1], [0.0], [64, 128]), turn([1], [0.0], [192], [64]), turn([1], [0.0], [], [64])]
    judged = [judge(one, one) for one in turns + turns]
    assert summary("side", judged, num_turns=3)[-2:] == (6, 2)


def test_the_watch_sees_which_snapshots_a_tier_stores_and_loads(monkeypatch: pytest.MonkeyPatch):
    for name in ("reserve_all", "acquire"):  # put back what the watch replaces
        monkeypatch.setattr(CpuTierManager, name, getattr(CpuTierManager, name))
    watch, tier = Watch(), CpuTierManager(4, 16, 1)
    chunk = PlannedObject(ObjectId("f0", b"x"), (), 0, 64, 16, group_id=0)
    snapshot = PlannedObject(ObjectId("s", b"x"), (chunk.object_id,), 64, 64, 16)
    tickets = [*tier.reserve_all([chunk]), *tier.reserve_all([snapshot]), *tier.reserve_all([snapshot])]
    tier.commit_all([ticket.ticket for ticket in tickets if ticket is not None])
    assert watch.take() == ([64], [])
    assert tier.acquire([chunk, snapshot]) is not None
    assert watch.take() == ([], [64])
