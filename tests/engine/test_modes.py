# SPDX-License-Identifier: Apache-2.0
"""Ways to run an engine that meet the cache: where the connector stands, other numbers, other schedules."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Judges
from tests.engine.bar import BAR, UNCACHED, distance
from tests.engine.client import Engine, Output, cpu_child, disk_child, multi, prompt
from tests.engine.restore import assert_restored
from tests.engine.states import FLOAT32
from tests.models.families import make_gemma3

pytestmark = pytest.mark.engine

N = FLOAT32.block_size
LENGTHS = (150, N + 90, 2600)


def cold_answers(engine: Engine) -> dict[int, Output]:
    """The tiers have them; the device cache has not."""
    cold = {length: engine.generate(prompt(length, seed=length)) for length in LENGTHS}
    assert not any(answer.num_cached_tokens for answer in cold.values())
    engine.evict()
    return cold


def restores(engine: Engine, cold: dict[int, Output], tier: str) -> None:
    before = engine.metric("vllm:hybrid_offload_loaded_bytes", connector=tier)
    for length, answer in cold.items():
        assert_restored(answer, engine.generate(prompt(length, seed=length)), length)
    assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector=tier) > before
    assert engine.metric("vllm:hybrid_offload_hook_errors") == 0


def test_a_cpu_tier_works_at_the_top_level_and_with_an_fp8_cache(tiny_model: Path) -> None:
    """Blocks of fp8 numbers are kept whole, so restores end at multiples of the block size."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has an fp8 KV cache on x86 with AVX-512 or AMX only")
    arguments = {"kv_cache_dtype": "fp8", "mamba_ssm_cache_dtype": "float32", "kv_transfer_config": cpu_child()}
    with Engine(tiny_model, **arguments) as engine:
        mode = engine.call("feature", name="mode")
        assert (mode["connector"], mode["cache_dtype"]) == ("HybridOffloadConnector", "fp8")
        block_size = mode["block_size"]
        for length in (150, block_size + 100, 2 * block_size + 100):
            tokens = prompt(length, seed=length)
            cold = engine.generate(tokens)
            engine.evict()
            restored = engine.generate(tokens)
            assert restored.num_cached_tokens == (length - 1) // block_size * block_size
            assert restored.same_as(cold)
            engine.reset_device_cache()
        assert engine.metric("vllm:hybrid_offload_hook_errors") == 0


@pytest.mark.engines
def test_a_disk_tier_works_at_the_top_level_and_without_chunked_prefill(tmp_path: Path) -> None:
    """A model without states: with them vLLM refuses ("Chunked prefill is required for mamba cache mode 'align'")."""
    model = make_gemma3(tmp_path / "gemma")
    arguments: dict[str, Any] = {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192}
    arguments["kv_transfer_config"] = disk_child(tmp_path / "root")
    with Engine(model, **arguments) as engine:
        mode = engine.call("feature", name="mode")
        assert (mode["connector"], mode["chunked_prefill"]) == ("HybridOffloadConnector", False)
        for length in LENGTHS:
            engine.generate(prompt(length, seed=length))
        by_device = {length: engine.generate(prompt(length, seed=length)) for length in LENGTHS}
        engine.evict()
        restores(engine, by_device, "disk")


@pytest.mark.compiled
def test_models_that_are_compiled_restore_what_they_computed(tiny_model: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {**FLOAT32.arguments, "enforce_eager": False}
    arguments["kv_transfer_config"] = multi(cpu_child(), disk_child(tmp_path / "root"))
    with Engine(tiny_model, {"TORCHDYNAMO_DISABLE": "0"}, **arguments) as engine:
        assert engine.call("feature", name="mode")["compilation_mode"] > 0
        cold_answers(engine)  # the first of a kind may be computed before all is compiled
        engine.call("reset_everything")
        restores(engine, cold_answers(engine), "cpu")


@pytest.mark.engines
def test_requests_that_are_preempted_for_more_urgent_ones_are_restored_and_right(
    tiny_model: Path, tmp_path: Path, judges: Judges
) -> None:
    """Three requests fill the cache; later ones with a higher priority take their blocks."""
    prompts = [prompt(N - 40 + 7 * number, seed=300 + number) for number in range(6)]
    priorities = [5, 5, 5, 1, 1, 1]
    arguments: dict[str, Any] = {**FLOAT32.arguments, "scheduling_policy": "priority", "num_gpu_blocks_override": 24}
    arguments["kv_transfer_config"] = multi(cpu_child(), disk_child(tmp_path / "root"))
    with Engine(tiny_model, **arguments) as engine:
        answers = engine.call("feature", name="preempted", prompts=prompts, priorities=priorities, max_tokens=80)
        engine.wait_for_stores()
        assert engine.metric("vllm:hybrid_offload_restored_requests") > 0  # all prompts are new: what was preempted
        assert engine.metric("vllm:hybrid_offload_pending_loads") == 0
        assert engine.metric("vllm:hybrid_offload_hook_errors") == 0
    assert sum(answer["num_preemptions"] for answer in answers[:3]) > 0
    for tokens, answer in zip(prompts, answers, strict=True):
        said = Output(answer["token_ids"], answer["logprobs"], 0)
        assert distance(judges(FLOAT32, UNCACHED), tokens, said) <= BAR
