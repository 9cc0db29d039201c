# SPDX-License-Identifier: Apache-2.0
"""LFM2: short convolutions between full attention."""

from pathlib import Path

from tests.models.configuration import common
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, scale, sharpen, write_model


def make_lfm2(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a model of six layers, two of them attention, as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import Lfm2Config, Lfm2ForCausalLM

        config = Lfm2Config(
            **common(context_tokens),
            num_hidden_layers=6,
            block_auto_adjust_ff_dim=False,
            conv_dim=128,
            block_dim=128,
            layer_types=["conv", "conv", "full_attention"] * 2,
        )
        torch.manual_seed(0)
        model = Lfm2ForCausalLM(config).to(torch.bfloat16)
        sharpen(model)
        scale(model, {"embed_tokens": 8.0, "conv.": 4.0, "v_proj": 8.0, "self_attn.out_proj": 16.0})
        return model

    return write_model(directory, make)
