# SPDX-License-Identifier: Apache-2.0
"""Qwen3, dense: full attention alone."""

from pathlib import Path

from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, VOCAB_SIZE, scale, sharpen, write_model


def make_qwen3(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a dense Qwen3 model of two layers as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=context_tokens,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        sharpen(model)
        scale(model, {"v_proj": 8.0, "o_proj": 16.0, "lm_head": 8.0})
        return model

    return write_model(directory, make)
