# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1: Mamba2 and attention side by side in every layer."""

from pathlib import Path

from tests.models.configuration import common
from tests.models.slow_decay import decay_slowly
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, scale, write_model


def make_falcon_h1(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a Falcon-H1 model (two layers, each with Mamba2 and attention) as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import FalconH1Config, FalconH1ForCausalLM

        config = FalconH1Config(
            **common(context_tokens),
            num_hidden_layers=2,
            mamba_d_ssm=256,
            mamba_n_heads=4,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_n_groups=2,
            mamba_chunk_size=64,
            mamba_rms_norm=True,
        )
        torch.manual_seed(0)
        model = FalconH1ForCausalLM(config).to(torch.bfloat16)
        decay_slowly(model)
        scale(
            model,
            {
                "mamba.in_proj": 4.0,
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
