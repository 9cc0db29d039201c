# SPDX-License-Identifier: Apache-2.0
"""Prompts that share less than a block, or no whole number of blocks: where their junction lies, and what outlives."""

from pathlib import Path

import pytest

from tests.conftest import Judges
from tests.engine.bar import PLAIN, computed
from tests.engine.client import Engine, Output, cpu_child, disk_child, multi, prompt
from tests.engine.restore import U
from tests.engine.states import States

pytestmark = [pytest.mark.engine, pytest.mark.processor]

SHARED = (500, 1400)
OWN = (150, 1300, 90, 700, 345)
"""Tokens of each sibling alone: the last one comes after a restart. No prompt ends one token past a match unit, where
vLLM itself is not exact."""


def siblings(shared: int) -> list[list[int]]:
    return [prompt(shared, seed=shared) + prompt(own, seed=shared + own) for own in OWN]


@pytest.mark.parametrize(
    "chunk", [pytest.param(64, marks=pytest.mark.engines), "auto"], ids=lambda chunk: f"chunk-{chunk}"
)
def test_from_the_third_sibling_on_a_shared_prefix_is_restored_to_its_last_match_unit(
    tiny_model: Path, tmp_path: Path, states: States, judges: Judges, chunk: int | str
) -> None:
    """The device cache is emptied before each prompt. With ``auto`` the disk tier's chunks are blocks, so that on disk
    a junction inside the first block is a snapshot that holds all attention itself."""
    children = cpu_child(hybrid_chunk_size=chunk), disk_child(tmp_path / "root", hybrid_chunk_size=chunk)
    options = {**states.arguments, "kv_transfer_config": multi(*children)}
    answers: dict[int, list[Output]] = {}

    with Engine(tiny_model, **options) as engine:
        block = engine_block(engine)
        for shared in SHARED:
            answers[shared] = []
            for tokens in siblings(shared)[:-1]:
                engine.evict()
                answers[shared].append(engine.generate(tokens))
        engine.wait_for_stores()
    with Engine(tiny_model, **options) as engine:
        for shared in SHARED:
            answers[shared].append(engine.generate(siblings(shared)[-1]))
        assert engine.metric("vllm:hybrid_offload_restored_tokens", connector="cpu") == 0
    restored = {shared: [one.num_cached_tokens for one in each] for shared, each in answers.items()}

    assert SHARED[0] < block and all(shared % block for shared in SHARED), block
    assert all(min(each[2:]) >= shared // U * U for shared, each in restored.items()), restored
    plain = judges(states, PLAIN)
    differ = [
        (shared, place)
        for shared, each in answers.items()
        for place, (tokens, answer) in enumerate(zip(siblings(shared), each, strict=True))
        if not answer.same_as(computed(plain, tokens))
    ]
    assert differ == []


def engine_block(engine: Engine) -> float:
    """N, as the CPU tier has found it."""
    engine.generate(prompt(10, seed=0))
    return engine.metric("vllm:hybrid_offload_block_tokens", connector="cpu")
