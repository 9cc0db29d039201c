# SPDX-License-Identifier: Apache-2.0
"""The main job in process: what is restored equals what was computed, in tokens and in logprobs, exactly."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, Output, cpu_child, disk_child, multi, prompt

pytestmark = pytest.mark.engine

N = 1152
U = 64
LENGTHS = (63, 64, 65, 300, 640, N - 1, N, N + 1, 2 * N + 1, 3900, 6000)
BUDGETS = (N, 2 * N - 1, 2 * N, 8192)


def restorable(num_tokens: int) -> int:
    """What an identical resend must restore at least."""
    return (num_tokens - 1) // U * U


def assert_restored(cold: Output, restored: Output, num_tokens: int) -> None:
    assert restored.num_cached_tokens >= restorable(num_tokens)
    assert restored.same_as(cold), (num_tokens, cold, restored)


@pytest.mark.parametrize("budget", BUDGETS)
def test_restores_equal_the_cold_run_from_cpu_and_after_a_restart_from_disk(
    tiny_model: Path, tmp_path: Path, budget: int
) -> None:
    config = multi(cpu_child(), disk_child(tmp_path / "root"))
    options = {"max_num_batched_tokens": budget, "kv_transfer_config": config}
    prompts = {length: prompt(length, seed=length) for length in LENGTHS}
    cold: dict[int, Output] = {}

    with Engine(tiny_model, **options) as engine:
        for length, tokens in prompts.items():
            cold[length] = engine.generate(tokens)
            assert cold[length].num_cached_tokens == 0
            engine.reset_device_cache()
            assert_restored(cold[length], engine.generate(tokens), length)
            served_by_device = engine.generate(tokens)
            assert_restored(cold[length], served_by_device, length)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") > 0
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") == 0
        engine.wait_for_stores()

    with Engine(tiny_model, **options) as engine:
        for length, tokens in prompts.items():
            assert_restored(cold[length], engine.generate(tokens), length)
        loaded_from_disk = engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk")
        assert loaded_from_disk > 0
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") == 0
        for length, tokens in prompts.items():
            engine.reset_device_cache()
            assert_restored(cold[length], engine.generate(tokens), length)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") == loaded_from_disk
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") > 0
