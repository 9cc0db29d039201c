# SPDX-License-Identifier: Apache-2.0
"""What the tiny models have in common."""

from tools.tiny_model import VOCAB_SIZE, configuration


def common(context_tokens: int) -> dict[str, object]:
    """Fields of a configuration of transformers, any family's: a small decoder, and no token that ends an answer."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_tokens,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def gdn(context_tokens: int) -> dict[str, object]:
    """The same for families whose layers are three of GDN and one of full attention by turns, with experts."""
    return {
        **configuration(context_tokens, num_layers=8),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
