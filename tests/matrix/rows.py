# SPDX-License-Identifier: Apache-2.0
"""The models of the matrix, and the arguments of ``vllm.LLM`` that each runs with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.engine.states import BFLOAT16, FLOAT32
from tests.models.cohere2 import make_cohere2
from tests.models.gemma3 import make_gemma3
from tests.models.gpt_oss import make_gpt_oss
from tests.models.lfm2 import make_lfm2
from tests.models.llama import make_llama
from tests.models.mistral import make_mistral
from tests.models.phi3 import make_phi3
from tests.models.qwen3_5_moe import make_qwen3_5_moe
from tests.models.qwen3_next import make_qwen3_next
from tools.tiny_model import make_tiny_model

UNIT = 64
"""Tokens: the match unit; of a model with a single KV cache group, which has no such choice, the block size."""
SINGLE_GROUP = {"prefix_match_unit": None, "block_size": UNIT}


@dataclass(frozen=True, slots=True)
class Row:
    """One model. ``layers`` says in words what lies in it."""

    name: str
    layers: str
    make: Callable[[Path], Path]
    arguments: dict[str, Any] = field(default_factory=dict)


ROWS = (
    Row("Qwen3.5, float32 states", "GDN, full attention", partial(make_tiny_model, num_layers=8), FLOAT32.arguments),
    Row("Qwen3.5, bfloat16 states", "GDN, full attention", partial(make_tiny_model, num_layers=8), BFLOAT16.arguments),
    Row("Qwen3.5-MoE", "GDN, full attention, experts", make_qwen3_5_moe),
    Row("Qwen3-Next", "GDN, full attention, experts", make_qwen3_next),
    Row("LFM2", "short convolutions, full attention", make_lfm2),
    Row("Gemma 3", "windows, full attention", make_gemma3),
    Row("gpt-oss", "windows, full attention, sinks, experts", make_gpt_oss),
    Row("Cohere2", "windows, full attention without positions", make_cohere2),
    Row("Mistral", "windows alone", make_mistral, SINGLE_GROUP),
    Row("Llama 3", "full attention alone", make_llama, SINGLE_GROUP),
    Row("Phi-3", "full attention alone, LongRoPE", make_phi3, SINGLE_GROUP),
)


def row(name: str) -> Row:
    """The row of that name; ``KeyError`` if there is none."""
    return {row.name: row for row in ROWS}[name]
