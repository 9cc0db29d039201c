# SPDX-License-Identifier: Apache-2.0
"""Llama 3: full attention in every layer, a single KV cache group."""

from pathlib import Path

from tests.models.configuration import common
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, scale, write_model


def make_llama(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a model of two layers, as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            **common(context_tokens),
            num_hidden_layers=2,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        scale(model, {"q_proj": 4.0, "k_proj": 4.0, "v_proj": 8.0, "o_proj": 16.0, "lm_head": 8.0})
        return model

    return write_model(directory, make)
