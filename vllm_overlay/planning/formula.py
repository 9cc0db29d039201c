# SPDX-License-Identifier: Apache-2.0
"""The unified block size N by vLLM's rule, for a platform that is not here to be asked.

An attention page of N tokens must be at least a page of states. N must be a multiple of the block that kernels and
server ask for. The smallest such N holds. The state page is then padded to the attention page.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_overlay.config import ConfigError
from vllm_overlay.planner.geometry import Group, GroupKind
from vllm_overlay.planning.engine_layout import EngineLayout
from vllm_overlay.planning.model_facts import ModelFacts, StateFacts
from vllm_overlay.planning.question import Platform, Question

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class BlockRule:
    """``kernel_tokens``: the smallest block that the attention kernels take. ``default_tokens``: without a flag."""

    kernel_tokens: int
    default_tokens: int


BLOCK_RULES: Mapping[Platform, BlockRule] = {"cuda": BlockRule(16, 16), "cpu": BlockRule(32, 128)}
"""FlashAttention, FlashInfer and Triton on CUDA; vLLM's attention backend for CPUs."""


def unified_block_size(state_page_bytes: int, token_bytes: int, block_tokens: int, kernel_tokens: int) -> int:
    """N in tokens. ``token_bytes`` is one token of attention KV in one layer; ``block_tokens`` the server's block."""
    step = max(kernel_tokens, block_tokens)
    size = step * -(-state_page_bytes // (step * token_bytes))
    aligned = kernel_tokens * -(-size // kernel_tokens)
    return max(block_tokens, aligned)


def layout_by_formula(facts: ModelFacts, question: Question) -> EngineLayout:
    """What one rank will have. Raises ConfigError for a dtype or a number of ranks that cannot be."""
    rule = BLOCK_RULES[question.platform]
    block_size = question.block_size or rule.default_tokens
    token_bytes = _token_bytes(facts, question)
    groups = []
    state_dtype = ""
    if facts.states is not None:
        state_dtype = _state_dtype(facts, question)
        page_bytes = _state_bytes(facts.states, facts.dtype, state_dtype, question.world_size)
        block_size = unified_block_size(page_bytes, token_bytes, block_size, rule.kernel_tokens)
        groups.append(
            Group(0, GroupKind.RECURRENT, block_size, 0, page_bytes * facts.states.num_layers, sliceable=False)
        )
    all_layers = token_bytes * facts.num_layers
    is_cut = question.platform == "cuda" or _kv_element_bytes(facts, question) > 1
    groups.append(
        Group(
            group_id=len(groups),
            kind=GroupKind.FULL,
            block_size=block_size,
            token_bytes=all_layers if is_cut else 0,
            page_bytes=block_size * all_layers,
            sliceable=is_cut,
        )
    )
    return EngineLayout(
        origin=f"by formula for {question.platform} with kernel blocks of {rule.kernel_tokens} tokens, not asked",
        groups=tuple(groups),
        block_size=block_size,
        dtype=facts.dtype,
        state_dtype=state_dtype,
        max_model_len=question.max_model_len or facts.max_model_len,
        max_num_batched_tokens=question.max_num_batched_tokens,
    )


def _token_bytes(facts: ModelFacts, question: Question) -> int:
    """Keys and values of one token, in one layer of one rank."""
    ranks = question.world_size
    if max(facts.num_kv_heads, ranks) % min(facts.num_kv_heads, ranks):
        raise ConfigError(f"--tensor-parallel-size {ranks} does not go into {facts.num_kv_heads} KV heads")
    return 2 * max(1, facts.num_kv_heads // ranks) * facts.head_size * _kv_element_bytes(facts, question)


def _kv_element_bytes(facts: ModelFacts, question: Question) -> int:
    given = question.kv_cache_dtype
    return _element_bytes(facts.dtype if given in (None, "auto") else str(given), "--kv-cache-dtype")


def _state_dtype(facts: ModelFacts, question: Question) -> str:
    """As vLLM resolves ``auto``: what the configuration names, else the model's own."""
    given = question.mamba_ssm_cache_dtype
    assert facts.states is not None
    return str(given) if given not in (None, "auto") else facts.states.dtype or facts.dtype


def _state_bytes(states: StateFacts, dtype: str, state_dtype: str, num_ranks: int) -> int:
    """All states of one layer in one rank."""
    if states.num_value_heads % num_ranks or states.convolution_elements % num_ranks:
        raise ConfigError(f"--tensor-parallel-size {num_ranks} does not divide {states.num_value_heads} value heads")
    convolution = states.convolution_elements * _element_bytes(dtype, "dtype")
    recurrent = states.recurrent_elements * _element_bytes(state_dtype, "--mamba-ssm-cache-dtype")
    return (convolution + recurrent) // num_ranks


def _element_bytes(dtype: str, setting: str) -> int:
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"the formula does not know {setting} {dtype!r}, only {', '.join(ELEMENT_BYTES)}")
    return ELEMENT_BYTES[dtype]
