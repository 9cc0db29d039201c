# SPDX-License-Identifier: Apache-2.0
"""The models of the matrix, and the arguments of ``vllm.LLM`` that each runs with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.engine.states import BFLOAT16, FLOAT32
from tests.matrix.cells import Cell, Verdict
from tests.models.families import (
    make_cohere2,
    make_deepseek,
    make_falcon_h1,
    make_gemma3,
    make_gpt_oss,
    make_granite4,
    make_jamba,
    make_lfm2,
    make_llama,
    make_llama4,
    make_mamba2,
    make_mistral,
    make_nemotron_h,
    make_phi3,
    make_qwen3,
    make_qwen3_5_moe,
    make_qwen3_next,
    make_qwen3_next_mtp,
)
from tools.tiny_model import make_tiny_model

UNIT = 64
"""Tokens: the match unit; of a model with a single KV cache group, which has no such choice, the block size."""
SINGLE_GROUP = {"prefix_match_unit": None, "block_size": UNIT}


@dataclass(frozen=True, slots=True)
class Excuse:
    """Why a model may not run at all: a pattern of what its engine then says, and that in words."""

    error: str
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One model. ``layers`` says in words what lies in it. Without its ``excuse`` it runs."""

    name: str
    layers: str
    make: Callable[[Path], Path]
    arguments: dict[str, Any] = field(default_factory=dict)
    excuse: Excuse | None = None
    misses_shared_prefix: str = ""
    """Why a shared prefix is not found, if that is so."""

    def allows(self, cell: Cell) -> bool:
        """Whether this is right, or what the row says that it may be."""
        known = [Cell(Verdict.NO_HIT, self.misses_shared_prefix)] if self.misses_shared_prefix else []
        if self.excuse is not None:
            known.append(Cell(Verdict.NOT_RUN, self.excuse.reason))
        return cell.is_good or cell in known


NO_MAMBA = Excuse(
    "IndexError|no attribute 'selective_scan_fwd'",
    "vLLM's CPU build has no kernel for it, with a connector or without",
)
NO_MLA = Excuse(
    "needs the prefix cache", "vLLM's CPU platform has no prefix cache for MLA where the processor has no AMX, as here"
)

MTP = {**FLOAT32.arguments, "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
make_qwen3_5_mtp = partial(make_tiny_model, num_layers=8, has_draft_head=True)
NO_ATTENTION = "without attention nothing tells how far two prompts are alike, so no state is kept there"

ROWS = (
    Row("Qwen3.5, float32 states", "GDN, full attention", partial(make_tiny_model, num_layers=8), FLOAT32.arguments),
    Row("Qwen3.5, bfloat16 states", "GDN, full attention", partial(make_tiny_model, num_layers=8), BFLOAT16.arguments),
    Row("Qwen3.5-MoE", "GDN, full attention, experts", make_qwen3_5_moe),
    Row("Qwen3-Next", "GDN, full attention, experts", make_qwen3_next),
    Row("Qwen3.5 that drafts with MTP", "GDN, full attention", make_qwen3_5_mtp, MTP),
    Row("Qwen3-Next that drafts with MTP", "GDN, full attention, experts", make_qwen3_next_mtp, MTP),
    Row("Nemotron-H", "Mamba2, full attention", make_nemotron_h),
    Row("Falcon-H1", "Mamba2 and full attention in each layer", make_falcon_h1),
    Row("Granite 4", "Mamba2, full attention", make_granite4),
    Row("Mamba2", "Mamba2 alone", make_mamba2, SINGLE_GROUP, misses_shared_prefix=NO_ATTENTION),
    Row("Jamba", "Mamba (the first version), full attention", make_jamba, excuse=NO_MAMBA),
    Row("LFM2", "short convolutions, full attention", make_lfm2),
    Row("Gemma 3", "windows, full attention", make_gemma3),
    Row("gpt-oss", "windows, full attention, sinks, experts", make_gpt_oss),
    Row("Cohere2", "windows, full attention without positions", make_cohere2),
    Row("Llama 4", "chunked local attention, full attention without positions", make_llama4, {"block_size": UNIT}),
    Row("Mistral", "windows alone", make_mistral, SINGLE_GROUP),
    Row("Llama 3", "full attention alone", make_llama, SINGLE_GROUP),
    Row("Qwen3", "full attention alone", make_qwen3, SINGLE_GROUP),
    Row("Phi-3", "full attention alone, LongRoPE", make_phi3, SINGLE_GROUP),
    Row("DeepSeek V2", "MLA, on a processor with AMX", make_deepseek, SINGLE_GROUP, NO_MLA),
)


def row(name: str) -> Row:
    """The row of that name; ``KeyError`` if there is none."""
    return {row.name: row for row in ROWS}[name]
