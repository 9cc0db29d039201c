# SPDX-License-Identifier: Apache-2.0
"""Heads of EAGLE and EAGLE3 for the tiny model: random weights, so they draft what it hardly ever says."""

from pathlib import Path
from typing import Any

from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, VOCAB_SIZE, scale, write_model


def make_head(directory: Path, method: str = "eagle3", *, num_kv_heads: int = 2, seed: int = 0) -> Path:
    """A checkpoint of its own for that ``method`` of ``--speculative-config``.

    With the model's own 2 heads of keys its layer is in the KV cache group of the model's attention, else in a group of
    its own.
    """

    def make() -> Any:
        import torch
        from transformers import LlamaConfig, LlamaModel

        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=(hidden := 128),
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=num_kv_heads,
            head_dim=32,
            max_position_embeddings=DEFAULT_CONTEXT_TOKENS,
            bos_token_id=None,
            eos_token_id=None,
        )
        torch.manual_seed(seed)
        is_third = method == "eagle3"
        head = type("Eagle3LlamaForCausalLM" if is_third else "EagleLlamaForCausalLM", (LlamaModel,), {})(config)
        layer = head.layers[0]
        if is_third:  # It sees three layers of the model, and its own attention also a token's embedding.
            config.eagle_aux_hidden_state_layer_ids = [0, 1, 2]
            layer.hidden_norm = torch.nn.RMSNorm(hidden)
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(layer.self_attn, name)
                setattr(layer.self_attn, name, torch.nn.Linear(2 * hidden, old.out_features, bias=False))
        else:
            head.norm = layer.input_layernorm = torch.nn.Identity()
        head.fc = torch.nn.Linear((3 if is_third else 2) * hidden, hidden, bias=False)
        scale(head, {"q_proj": 8.0, "k_proj": 8.0, "v_proj": 8.0, "o_proj": 16.0})
        return head.to(torch.bfloat16)

    return write_model(directory, make)
