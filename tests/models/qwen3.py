# SPDX-License-Identifier: Apache-2.0
"""Qwen3, dense: full attention alone."""

from pathlib import Path

from tests.models.configuration import common
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, scale, sharpen, write_model


def make_qwen3(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a dense Qwen3 model of two layers as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            **common(context_tokens),
            num_hidden_layers=2,
            head_dim=32,
        )
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        sharpen(model)
        scale(model, {"v_proj": 8.0, "o_proj": 16.0, "lm_head": 8.0})
        return model

    return write_model(directory, make)
