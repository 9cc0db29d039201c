# SPDX-License-Identifier: Apache-2.0
"""Phi-3: full attention whose rotary embedding (LongRoPE) depends on ``--max-model-len``."""

from pathlib import Path

from tests.models.configuration import common
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, scale, write_model

LONG_ROPE_FROM_TOKENS = 2048
"""With a longer ``--max-model-len`` the model has its long factors."""


def make_phi3(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a Phi-3 model, whose rotary embedding depends on ``--max-model-len``, as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import Phi3Config, Phi3ForCausalLM

        config = Phi3Config(
            **common(context_tokens),
            num_hidden_layers=2,
            original_max_position_embeddings=LONG_ROPE_FROM_TOKENS,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 16,
                "long_factor": [1.0 + index for index in range(16)],
                "original_max_position_embeddings": LONG_ROPE_FROM_TOKENS,
            },
        )
        torch.manual_seed(0)
        model = Phi3ForCausalLM(config).to(torch.bfloat16)
        scale(model, {"qkv_proj": 8.0, "o_proj": 16.0, "lm_head": 8.0})
        return model

    return write_model(directory, make)
