# SPDX-License-Identifier: Apache-2.0
"""Gemma 3: sliding windows between full attention."""

from pathlib import Path

from tests.models.configuration import common
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, scale, sharpen, write_model

SLIDING_WINDOW = 256


def make_gemma3(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a Gemma 3 model (windows of 256 tokens, two of six layers full attention) as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        config = Gemma3TextConfig(
            **common(context_tokens),
            num_hidden_layers=6,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=SLIDING_WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        )
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(config).to(torch.bfloat16)
        sharpen(model)
        scale(model, {"embed_tokens": 8.0, "v_proj": 8.0, "o_proj": 16.0})
        return model

    return write_model(directory, make)
