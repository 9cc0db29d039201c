# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H: Mamba2, attention and MLP, each in layers of their own."""

from pathlib import Path

from tests.models.configuration import common
from tests.models.slow_decay import decay_slowly
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, scale, write_model


def make_nemotron_h(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a Nemotron-H model (three layers of Mamba2, one of attention, one MLP) as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import NemotronHConfig, NemotronHForCausalLM

        config = NemotronHConfig(
            **common(context_tokens),
            layers_block_type=["linear_attention", "mlp", "linear_attention", "linear_attention", "full_attention"],
            head_dim=32,
            mamba_num_heads=4,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=2,
        )
        torch.manual_seed(0)
        model = NemotronHForCausalLM(config).to(torch.bfloat16)
        decay_slowly(model)
        scale(
            model,
            {
                "mixer.in_proj": 4.0,
                "mixer.out_proj": 8.0,
                "q_proj": 8.0,
                "k_proj": 8.0,
                "v_proj": 8.0,
                "o_proj": 16.0,
                "lm_head": 8.0,
            },
        )
        return model

    return write_model(directory, make)
