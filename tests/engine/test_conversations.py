# SPDX-License-Identifier: Apache-2.0
"""Conversations with the engine's own answers: what each turn restores, whether it is exact, what is stored for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Judges
from tests.engine.bar import PLAIN, computed
from tests.engine.client import Engine, Output, cpu_child, multi, prompt
from tests.engine.restore import restorable
from tests.engine.states import States

pytestmark = pytest.mark.engine

TURNS = 6
ANSWER_TOKENS = 90
"""Each answer fills at least one chunk of 64 tokens, which decode steps have written."""


def chat(engine: Engine, **arguments: object) -> Iterator[tuple[list[int], Output]]:
    """Each turn's prompt and its answer; only the tiers know the turns before."""
    history = prompt(300, seed=11)
    for turn in range(TURNS):
        engine.evict()
        answer = engine.generate(history, max_tokens=ANSWER_TOKENS)
        yield history, answer
        # A prompt one token past a match unit would not be exact in vLLM itself.
        text = next(size for size in range(70 + turn, 100) if (len(history) + ANSWER_TOKENS + size) % 64 not in (0, 1))
        history = history + answer.token_ids + prompt(text, seed=12 + turn)


def test_every_turn_restores_the_turn_before_and_answers_as_vllm_without_a_connector(
    tiny_model: Path, states: States, judges: Judges
) -> None:
    with Engine(tiny_model, **states.arguments, kv_transfer_config=multi(cpu_child())) as engine:
        turns = list(chat(engine))
        boundaries = engine.call("fault", name="snapshots")
    before = [0] + [restorable(len(tokens)) for tokens, _ in turns]
    assert [answer.num_cached_tokens for _, answer in turns] == before[:-1]
    # vLLM keeps a state at the last block boundary of a prompt, too. No other is stored: none at the end of an answer.
    assert {boundary for boundary in boundaries if boundary % states.block_size} <= set(before[1:])
    plain = judges(states, PLAIN)
    differ = [
        turn
        for turn, (tokens, answer) in enumerate(turns)
        if not answer.same_as(computed(plain, tokens, ANSWER_TOKENS))
    ]
    assert differ == []
