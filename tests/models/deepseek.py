# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V2: multi-head latent attention (MLA), which keeps one latent vector a token.

Without AMX vLLM's CPU platform switches its prefix cache off.
"""

from pathlib import Path

from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, VOCAB_SIZE, scale, write_model


def make_deepseek(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a DeepSeek V2 model of two layers as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        config = DeepseekV2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            first_k_dense_replace=2,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=64,
            max_position_embeddings=context_tokens,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        torch.manual_seed(0)
        model = DeepseekV2ForCausalLM(config).to(torch.bfloat16)
        scale(model, {"q_proj": 8.0, "kv_a_proj": 4.0, "kv_b_proj": 8.0, "o_proj": 16.0, "lm_head": 8.0})
        return model

    return write_model(directory, make)
