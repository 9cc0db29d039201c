# SPDX-License-Identifier: Apache-2.0
"""Mamba, the first version, alone: no attention at all.

vLLM 0.32.0's CPU build has no scan kernel for it: the first request fails, with a connector or without.
"""

from pathlib import Path

from tests.models.slow_decay import decay_slowly
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, VOCAB_SIZE, scale, write_model


def make_mamba1(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a Mamba model of two layers as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import MambaConfig, MambaForCausalLM

        config = MambaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            num_hidden_layers=2,
            state_size=16,
            max_position_embeddings=context_tokens,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        torch.manual_seed(0)
        model = MambaForCausalLM(config).to(torch.bfloat16)
        decay_slowly(model)
        scale(model, {"mixer.in_proj": 4.0, "mixer.x_proj": 4.0, "mixer.out_proj": 8.0, "lm_head": 8.0})
        return model

    return write_model(directory, make)
