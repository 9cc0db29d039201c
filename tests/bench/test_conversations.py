# SPDX-License-Identifier: Apache-2.0
"""How the program judges a turn, and counts the snapshots that turns load."""

from bench.chat import Turn
from bench.conversations import judge, summary


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
