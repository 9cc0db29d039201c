# SPDX-License-Identifier: Apache-2.0
"""Cohere2 (Command R7B): sliding windows between full attention without positions."""

from pathlib import Path

from tests.models.configuration import common
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, scale, write_model

SLIDING_WINDOW = 256


def make_cohere2(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a model of four layers, the last with full attention, as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import Cohere2Config, Cohere2ForCausalLM

        config = Cohere2Config(
            **common(context_tokens),
            num_hidden_layers=4,
            sliding_window=SLIDING_WINDOW,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
        )
        torch.manual_seed(0)
        model = Cohere2ForCausalLM(config).to(torch.bfloat16)
        scale(model, {"embed_tokens": 8.0, "q_proj": 4.0, "k_proj": 4.0, "v_proj": 8.0, "o_proj": 16.0})
        return model

    return write_model(directory, make)
