# SPDX-License-Identifier: Apache-2.0
"""N by vLLM's rule, against what vLLM is known to log for published models with float32 states."""

from typing import Any

import pytest

from tests.engine.states import BFLOAT16, FLOAT32, States
from tests.planning.models import LLAMA, QWEN_0_8B, QWEN_27B, QWEN_35B, TINY
from vllm_overlay.config import ConfigError
from vllm_overlay.planning.engine_layout import EngineLayout
from vllm_overlay.planning.formula import layout_by_formula
from vllm_overlay.planning.model_facts import facts_of
from vllm_overlay.planning.question import Question


def layout(config: dict[str, Any], **given: Any) -> EngineLayout:
    return layout_by_formula(facts_of(config), Question(model="m", **{"platform": "cuda", **given}))


@pytest.mark.parametrize(("config", "block_size"), [(QWEN_0_8B, 544), (QWEN_27B, 784), (QWEN_35B, 1056)])
def test_block_sizes_on_cuda_with_float32_states(config: dict[str, Any], block_size: int) -> None:
    found = layout(config)
    assert (found.block_size, found.state_dtype, found.dtype) == (block_size, "float32", "bfloat16")


def test_fp8_tokens_are_half_as_large_so_blocks_are_twice_as_long() -> None:
    assert layout(QWEN_35B, kv_cache_dtype="fp8").block_size == 2096


def test_a_block_size_that_is_given_decides_the_step() -> None:
    assert layout(QWEN_35B, block_size=64).block_size == layout(QWEN_35B, block_size=1088).block_size == 1088


def test_bytes_of_a_token_and_of_the_states() -> None:
    recurrent, attention = layout(QWEN_35B).groups
    assert recurrent.page_bytes == 30 * 2_146_304
    assert attention.token_bytes == 10 * 2048
    assert attention.page_bytes == 10 * 2_162_688


def test_two_ranks_have_half_of_each() -> None:
    whole, half = layout(QWEN_35B).groups, layout(QWEN_35B, tensor_parallel_size=2).groups
    assert [group.page_bytes for group in half] == [group.page_bytes // 2 for group in whole]


def test_kv_heads_are_repeated_when_there_are_more_ranks() -> None:
    assert layout(QWEN_35B, tensor_parallel_size=4).groups[1].token_bytes == layout(QWEN_35B).groups[1].token_bytes // 2


@pytest.mark.parametrize("states", [FLOAT32, BFLOAT16], ids=str)
def test_the_tiny_model_on_a_cpu_has_the_blocks_that_engines_have(states: States) -> None:
    found = layout(TINY, platform="cpu", mamba_ssm_cache_dtype=states.dtype)
    assert found.block_size == states.block_size
    assert found.groups[0].page_bytes == states.num_bytes


def test_fp8_blocks_of_a_cpu_are_kept_whole() -> None:
    found = layout(TINY, platform="cpu", mamba_ssm_cache_dtype="float32", kv_cache_dtype="fp8")
    assert (found.block_size, found.groups[1].sliceable) == (2176, False)


def test_without_a_dtype_in_the_configuration_states_have_the_models() -> None:
    assert layout(TINY, platform="cpu").state_dtype == "bfloat16"


@pytest.mark.parametrize(("platform", "block_size"), [("cuda", 16), ("cpu", 128)])
def test_full_attention_alone_has_the_platforms_block(platform: str, block_size: int) -> None:
    found = layout(LLAMA, platform=platform)
    assert (found.block_size, found.state_dtype, found.takes_match_unit) == (block_size, "", False)


def test_it_says_that_nobody_was_asked() -> None:
    assert layout(QWEN_35B).origin == "by formula for cuda with kernel blocks of 16 tokens, not asked"


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        ({"model_type": "jamba"}, {}, "does not know models of type 'jamba'"),
        ({**LLAMA, "model_type": "qwen3", "sliding_window": 4096, "use_sliding_window": True}, {}, "sliding windows"),
        ({"model_type": "llama", "num_hidden_layers": 2}, {}, "has no 'num_attention_heads'"),
        ({**TINY, "layer_types": ["linear_attention", "sliding_attention"]}, {}, "layers of type 'sliding_attention'"),
        (QWEN_35B, {"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype 'nvfp4'"),
        (QWEN_35B, {"mamba_ssm_cache_dtype": "int8"}, "--mamba-ssm-cache-dtype 'int8'"),
        (QWEN_35B, {"tensor_parallel_size": 3}, "--tensor-parallel-size 3"),
        (QWEN_0_8B, {"tensor_parallel_size": 64}, "--tensor-parallel-size 64 does not divide 16 value heads"),
    ],
)
def test_what_the_formula_does_not_know_is_refused(config: dict[str, Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(config, **given)
