# SPDX-License-Identifier: Apache-2.0
"""The main job in process: what is restored equals what was computed, in tokens and in logprobs, exactly."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, Output, cpu_child, disk_child, multi, prompt
from tests.engine.restore import assert_restored, assert_restores, restored_bytes
from tests.engine.states import BFLOAT16, FLOAT32, TOKEN_BYTES, States

pytestmark = pytest.mark.engine


def lengths(n: int) -> tuple[int, ...]:
    """Around a match unit, around blocks of ``n`` tokens, and several blocks."""
    return (63, 64, 65, 300, n // 2, 640, n - 1, n, n + 1, 2 * n + 1, 3900)


CASES = [
    pytest.param(FLOAT32, 1152, marks=pytest.mark.processor),
    *(pytest.param(FLOAT32, budget, marks=pytest.mark.engines) for budget in (2303, 2304, 8192)),
    pytest.param(BFLOAT16, 1279, marks=pytest.mark.processor),
    *(pytest.param(BFLOAT16, budget, marks=pytest.mark.engines) for budget in (640, 8192)),
]
"""Tokens a step: N, 2N - 1, 2N, and more than any prompt has."""


def loaded_bytes(engine: Engine) -> float:
    """What the CPU tier has loaded so far."""
    return engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu")


@pytest.mark.parametrize(("states", "budget"), CASES, ids=str)
def test_restores_equal_the_cold_run_from_cpu_and_after_a_restart_from_disk(
    tiny_model: Path, tmp_path: Path, states: States, budget: int
) -> None:
    config = multi(cpu_child(), disk_child(tmp_path / "root"))
    options = {**states.arguments, "max_num_batched_tokens": budget, "kv_transfer_config": config}
    prompts = {length: prompt(length, seed=length) for length in lengths(states.block_size)}
    cold: dict[int, Output] = {}

    with Engine(tiny_model, **options) as engine:
        for length, tokens in prompts.items():
            cold[length] = engine.generate(tokens)
            assert cold[length].num_cached_tokens == 0
            engine.reset_device_cache()
            before = loaded_bytes(engine)
            assert_restores(engine, cold[length], tokens)
            assert loaded_bytes(engine) - before == restored_bytes(states, length)
            served_by_device = engine.generate(tokens)
            assert_restored(cold[length], served_by_device, length)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") == 0
        for connector in ("cpu", "disk"):
            assert engine.metric("vllm:hybrid_offload_token_bytes", connector=connector) == TOKEN_BYTES
            assert engine.metric("vllm:hybrid_offload_state_bytes", connector=connector) == states.num_bytes
        engine.wait_for_stores()

    with Engine(tiny_model, **options) as engine:
        for length, tokens in prompts.items():
            assert_restores(engine, cold[length], tokens)
        loaded_from_disk = engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk")
        assert loaded_from_disk > 0
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") == 0
        for length, tokens in prompts.items():
            engine.reset_device_cache()
            assert_restores(engine, cold[length], tokens)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") == loaded_from_disk
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") > 0
