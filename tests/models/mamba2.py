# SPDX-License-Identifier: Apache-2.0
"""Mamba2 alone: no attention at all."""

from pathlib import Path

from tests.models.slow_decay import decay_slowly
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, VOCAB_SIZE, scale, write_model


def make_mamba2(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a Mamba2 model of two layers as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import Mamba2Config, Mamba2ForCausalLM

        config = Mamba2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            num_hidden_layers=2,
            num_heads=4,
            head_dim=64,
            state_size=128,
            n_groups=2,
            expand=2,
            chunk_size=64,
            max_position_embeddings=context_tokens,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        torch.manual_seed(0)
        model = Mamba2ForCausalLM(config).to(torch.bfloat16)
        decay_slowly(model)
        scale(model, {"mixer.in_proj": 4.0, "mixer.out_proj": 8.0, "lm_head": 8.0})
        return model

    return write_model(directory, make)
