# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: sliding windows and full attention by turns, attention sinks, experts."""

from pathlib import Path

from tests.models.configuration import common
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, scale, write_model

SLIDING_WINDOW = 128


def make_gpt_oss(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a model of four layers whose experts are not quantised, as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import GptOssConfig, GptOssForCausalLM

        config = GptOssConfig(
            **common(context_tokens),
            num_hidden_layers=4,
            head_dim=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=SLIDING_WINDOW,
            layer_types=["sliding_attention", "full_attention"] * 2,
        )
        torch.manual_seed(0)
        model = GptOssForCausalLM(config).to(torch.bfloat16)
        scale(model, {"q_proj": 4.0, "k_proj": 4.0, "v_proj": 8.0, "o_proj": 16.0, "lm_head": 8.0})
        return model

    return write_model(directory, make)
