# SPDX-License-Identifier: Apache-2.0
"""Llama 4: attention within chunks of the prompt, between full attention without positions."""

from pathlib import Path

from tests.models.configuration import common
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, scale, write_model

ATTENTION_CHUNK = 256


def make_llama4(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a Llama 4 text model (chunks of 256 tokens, one of four layers full attention).

    As ``make_tiny_model`` does.
    """

    def make():
        import torch
        from transformers import Llama4ForCausalLM, Llama4TextConfig

        config = Llama4TextConfig(
            **common(context_tokens),
            intermediate_size_mlp=256,
            num_hidden_layers=4,
            head_dim=32,
            attention_chunk_size=ATTENTION_CHUNK,
            num_local_experts=2,
            interleave_moe_layer_step=4,
        )
        torch.manual_seed(0)
        model = Llama4ForCausalLM(config).to(torch.bfloat16)
        scale(model, {"q_proj": 8.0, "k_proj": 8.0, "v_proj": 8.0, "o_proj": 16.0, "lm_head": 8.0})
        return model

    return write_model(directory, make)
