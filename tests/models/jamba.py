# SPDX-License-Identifier: Apache-2.0
"""Jamba: Mamba, the first version, between attention.

vLLM 0.32.0's CPU build has no scan kernel for it: the first request fails, with a connector or without.
"""

from pathlib import Path

from tests.models.configuration import common
from tests.models.slow_decay import decay_slowly
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, scale, write_model


def make_jamba(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a Jamba model (three layers of Mamba, one of attention) as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import JambaConfig, JambaForCausalLM

        config = JambaConfig(
            **common(context_tokens),
            num_hidden_layers=4,
            attn_layer_period=4,
            attn_layer_offset=3,
            num_experts=1,
            num_experts_per_tok=1,
            mamba_d_state=16,
        )
        torch.manual_seed(0)
        model = JambaForCausalLM(config).to(torch.bfloat16)
        decay_slowly(model)
        scale(
            model,
            {
                "mamba.in_proj": 4.0,
                "mamba.x_proj": 4.0,
                "mamba.out_proj": 8.0,
                "q_proj": 8.0,
                "k_proj": 8.0,
                "v_proj": 8.0,
                "o_proj": 16.0,
                "lm_head": 8.0,
            },
        )
        return model

    return write_model(directory, make)
