# SPDX-License-Identifier: Apache-2.0
"""How much of the last turn's answer the next one restores: what ``store_decoded_tokens`` promises, in an engine."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import Engine, Output, cpu_child, multi, prompt
from tests.engine.restore import U, restorable
from tests.engine.states import BFLOAT16
from tests.models.families import make_gemma3

pytestmark = pytest.mark.engine

N = BFLOAT16.block_size
PROMPT, ANSWER, TEXT = N - 100, 250, 45
"""The answer goes over the end of a block, and fills chunks on both sides of it."""


def next_turn(engine: Engine) -> tuple[list[int], Output]:
    """The second turn of a chat and its answer; the device cache knows nothing of the first one."""
    first = prompt(PROMPT, seed=1)
    answer = engine.generate(first, max_tokens=ANSWER)
    engine.evict()
    second = first + answer.token_ids + prompt(TEXT, seed=2)
    return second, engine.generate(second)


@pytest.mark.parametrize(
    ("setting", "interval", "restored"),
    [
        pytest.param("auto", 0, restorable(PROMPT), id="off", marks=pytest.mark.engines),
        pytest.param("auto", N, restorable(PROMPT), id="off, states in answers", marks=pytest.mark.engines),
        pytest.param(True, 0, restorable(PROMPT), id="on", marks=pytest.mark.engines),
        pytest.param(True, N, N, id="on, states in answers"),
    ],
)
def test_with_states_an_answer_is_restored_to_the_last_state_that_vllm_keeps_in_it(
    tiny_model: Path, setting: Any, interval: int, restored: int
) -> None:
    """vLLM keeps states of decode steps only at the ends of blocks, and only where a retention interval asks for them.
    So without one the setting restores not a token more."""
    config = multi(cpu_child(store_decoded_tokens=setting))
    arguments = {**BFLOAT16.arguments, "prefix_cache_retention_interval": interval}
    with Engine(tiny_model, **arguments, kv_transfer_config=config) as engine:
        _, answer = next_turn(engine)
    assert answer.num_cached_tokens == restored


@pytest.mark.parametrize(
    ("setting", "of_answer"),
    [("auto", ANSWER), pytest.param(False, 0, marks=pytest.mark.engines)],
    ids=["default", "off"],
)
def test_without_states_the_whole_answer_is_restored_unless_it_is_not_stored(
    tmp_path: Path, setting: Any, of_answer: int
) -> None:
    config = multi(cpu_child(store_decoded_tokens=setting))
    with Engine(make_gemma3(tmp_path / "gemma"), kv_transfer_config=config) as engine:
        second, answer = next_turn(engine)
    assert len(second) - TEXT == PROMPT + ANSWER
    assert answer.num_cached_tokens == (PROMPT + of_answer) // U * U
