# SPDX-License-Identifier: Apache-2.0
"""Granite 4 (granitemoehybrid): Mamba2 between attention, with a mixture of experts."""

from pathlib import Path

from tests.models.slow_decay import decay_slowly
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, VOCAB_SIZE, scale, write_model


def make_granite4(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a Granite 4 model (three layers of Mamba2, one of attention) as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

        config = GraniteMoeHybridConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=128,
            shared_intermediate_size=256,
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_multiplier=32**-0.5,
            mamba_n_heads=4,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_n_groups=2,
            mamba_chunk_size=64,
            max_position_embeddings=context_tokens,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        torch.manual_seed(0)
        model = GraniteMoeHybridForCausalLM(config).to(torch.bfloat16)
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
