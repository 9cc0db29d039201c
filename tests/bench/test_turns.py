# SPDX-License-Identifier: Apache-2.0
"""What a turn is said to compute again, and what its chat is made of."""

from bench.turns import Turn, chat, columns, row
from vllm_overlay.server.api_client import Completion


class Api:
    """Has what it was last asked, but for the answer, unless its cache was emptied."""

    def __init__(self) -> None:
        self.cached, self.calls, self.prompts = 0, [], []

    def complete(self, prompt, max_tokens):
        self.calls.append("complete")
        self.prompts.append(prompt)
        completion = Completion([7] * max_tokens, [0.0] * max_tokens, len(prompt), self.cached, 0.1)
        self.cached = len(prompt)
        return completion

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def wait_for_stores(self):
        self.calls.append("wait")


def test_a_turn_goes_on_from_the_answer_before():
    api = Api()
    turns = chat(api, False, seed=1, num_turns=3, most_answer=30)
    assert [turn.prompt for turn in turns] == [len(prompt) for prompt in api.prompts]
    for turn, before, after in zip(turns[1:], api.prompts, api.prompts[1:], strict=False):
        assert after[: turn.last_prompt + turn.last_answer] == before + [7] * turn.last_answer
        assert (turn.cached, turn.recomputed, turn.answer_restored) == (len(before), turn.last_answer, 0)
    assert api.calls == ["complete"] * 3


def test_a_tier_alone_gets_an_empty_device_cache_and_the_time_to_store():
    api = Api()
    chat(api, True, seed=1, num_turns=2, most_answer=30)
    assert api.calls == ["reset", "complete", "wait"] * 2


def test_restored_tokens_of_an_answer_are_those_beyond_the_prompt_before():
    turn = Turn(prompt=1000, cached=640, last_prompt=600, last_answer=300)
    assert (turn.answer_restored, turn.recomputed) == (40, 260)
    all_of_it = Turn(prompt=1000, cached=960, last_prompt=600, last_answer=300)
    assert (all_of_it.answer_restored, all_of_it.recomputed) == (300, 0)


def test_a_row_has_the_mean_of_the_chats_for_each_turn_from_the_second_on():
    chats = [[Turn(500, 0, 0, 0), Turn(900, 448, 500, 100)], [Turn(500, 0, 0, 0), Turn(900, 548, 500, 100)]]
    assert dict(zip(columns(2), row("side", chats), strict=True)) == {
        "side": "side",
        "turn 2": 102,  # 152 and 52
        "all": 102,
        "answers restored": "48 of 200",
    }
