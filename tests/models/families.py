# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, a function for each family that the matrix runs.

Each writes its model into a directory, as ``make_tiny_model`` does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tools.tiny_model import (
    DEFAULT_CONTEXT_TOKENS,
    VOCAB_SIZE,
    add_draft_head,
    configuration,
    remember_and_look,
    scale,
    sharpen,
    write_model,
)

ATTENTION_CHUNK = 256
"""Of Llama 4."""
SLIDING_WINDOW = 256
LONG_ROPE_FROM_TOKENS = 2048
"""With a longer ``--max-model-len`` Phi-3 has its long factors."""
Settings = dict[str, Any]


class Make(Protocol):
    def __call__(self, directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path: ...


def _family(
    config: str, model: str, settings: Callable[[int], Settings], *changes: Callable[[Any], None], **more: Any
) -> Make:
    """Of transformers' classes of these names; ``settings`` are told the context. ``changes`` are made to weights."""

    def make(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
        def build() -> Any:
            import torch
            import transformers

            made = getattr(transformers, config)(**{**settings(context_tokens), **more})
            torch.manual_seed(0)
            built = getattr(transformers, model)(made).to(torch.bfloat16)
            for change in changes:
                change(built)
            return built

        return write_model(directory, build)

    return make


def _bare(context_tokens: int) -> Settings:
    """What every configuration of transformers has: no token ends an answer."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "max_position_embeddings": context_tokens,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _small(context_tokens: int) -> Settings:
    """A small decoder with attention."""
    return {**_bare(context_tokens), "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def _gdn(context_tokens: int) -> Settings:
    """Three layers of GDN and one of full attention by turns, with experts."""
    return {
        **configuration(context_tokens, num_layers=8),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }


def _decay_slowly(model: Any) -> None:
    """A state of Mamba keeps 99.9 % of itself from one token to the next."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-7.0)
            elif name.endswith(("dt_bias", "dt_proj.bias")):
                parameter.zero_()


def _scaled(factors: dict[str, float]) -> Callable[[Any], None]:
    return lambda model: scale(model, factors)


_VALUES = {"v_proj": 8.0, "o_proj": 16.0}
_ATTENTION = {"q_proj": 8.0, "k_proj": 8.0, **_VALUES, "lm_head": 8.0}
_MILD = {"q_proj": 4.0, "k_proj": 4.0, **_VALUES}
_MAMBA = {"mamba.in_proj": 4.0, "mamba.out_proj": 8.0}
_MIXER = {"mixer.in_proj": 4.0, "mixer.out_proj": 8.0}
_MAMBA2: Settings = {
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 64,
}

# With recurrent states.

make_qwen3_next = _family("Qwen3NextConfig", "Qwen3NextForCausalLM", _gdn, remember_and_look)
make_qwen3_next_mtp = _family("Qwen3NextConfig", "Qwen3NextForCausalLM", _gdn, remember_and_look, add_draft_head)
make_qwen3_5_moe = _family("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _gdn, remember_and_look)
make_nemotron_h = _family(
    "NemotronHConfig",
    "NemotronHForCausalLM",
    _small,
    _decay_slowly,
    _scaled({**_MIXER, **_ATTENTION}),
    layers_block_type=["linear_attention", "mlp", "linear_attention", "linear_attention", "full_attention"],
    head_dim=32,
    mamba_num_heads=4,
    mamba_head_dim=64,
    ssm_state_size=128,
    n_groups=2,
)
make_falcon_h1 = _family(
    "FalconH1Config",
    "FalconH1ForCausalLM",
    _small,
    _decay_slowly,
    _scaled({**_MAMBA, **_ATTENTION}),
    **_MAMBA2,
    num_hidden_layers=2,
    mamba_d_ssm=256,
    mamba_rms_norm=True,
)
make_granite4 = _family(
    "GraniteMoeHybridConfig",
    "GraniteMoeHybridForCausalLM",
    _small,
    _decay_slowly,
    _scaled({**_MAMBA, **_ATTENTION}),
    **_MAMBA2,
    intermediate_size=128,
    shared_intermediate_size=256,
    num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    num_local_experts=4,
    num_experts_per_tok=2,
    attention_multiplier=32**-0.5,
)
make_mamba2 = _family(
    "Mamba2Config",
    "Mamba2ForCausalLM",
    _bare,
    _decay_slowly,
    _scaled({**_MIXER, "lm_head": 8.0}),
    num_hidden_layers=2,
    num_heads=4,
    head_dim=64,
    state_size=128,
    n_groups=2,
    expand=2,
    chunk_size=64,
)
make_jamba = _family(
    "JambaConfig",
    "JambaForCausalLM",
    _small,
    _decay_slowly,
    _scaled({**_MAMBA, "mamba.x_proj": 4.0, **_ATTENTION}),
    num_hidden_layers=4,
    attn_layer_period=4,
    attn_layer_offset=3,
    num_experts=1,
    num_experts_per_tok=1,
    mamba_d_state=16,
)
make_lfm2 = _family(
    "Lfm2Config",
    "Lfm2ForCausalLM",
    _small,
    sharpen,
    _scaled({"embed_tokens": 8.0, "conv.": 4.0, "v_proj": 8.0, "self_attn.out_proj": 16.0}),
    num_hidden_layers=6,
    block_auto_adjust_ff_dim=False,
    conv_dim=128,
    block_dim=128,
    layer_types=["conv", "conv", "full_attention"] * 2,
)

# With windows, or attention within chunks.

make_gemma3 = _family(
    "Gemma3TextConfig",
    "Gemma3ForCausalLM",
    _small,
    sharpen,
    _scaled({"embed_tokens": 8.0, **_VALUES}),
    num_hidden_layers=6,
    head_dim=32,
    query_pre_attn_scalar=32,
    sliding_window=SLIDING_WINDOW,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
)
make_gpt_oss = _family(
    "GptOssConfig",
    "GptOssForCausalLM",
    _small,
    _scaled({**_MILD, "lm_head": 8.0}),
    num_hidden_layers=4,
    head_dim=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
make_cohere2 = _family(
    "Cohere2Config",
    "Cohere2ForCausalLM",
    _small,
    _scaled({"embed_tokens": 8.0, **_MILD}),
    num_hidden_layers=4,
    sliding_window=SLIDING_WINDOW,
    layer_types=["sliding_attention"] * 3 + ["full_attention"],
)
make_mistral = _family(
    "MistralConfig",
    "MistralForCausalLM",
    _small,
    _scaled({**_MILD, "lm_head": 8.0}),
    num_hidden_layers=2,
    sliding_window=SLIDING_WINDOW,
)
make_llama4 = _family(
    "Llama4TextConfig",
    "Llama4ForCausalLM",
    _small,
    _scaled(_ATTENTION),
    intermediate_size_mlp=256,
    num_hidden_layers=4,
    head_dim=32,
    attention_chunk_size=ATTENTION_CHUNK,
    num_local_experts=2,
    interleave_moe_layer_step=4,
)

# With full attention alone.

make_llama = _family("LlamaConfig", "LlamaForCausalLM", _small, _scaled({**_MILD, "lm_head": 8.0}), num_hidden_layers=2)
make_qwen3 = _family(
    "Qwen3Config",
    "Qwen3ForCausalLM",
    _small,
    sharpen,
    _scaled({**_VALUES, "lm_head": 8.0}),
    num_hidden_layers=2,
    head_dim=32,
)
make_phi3 = _family(
    "Phi3Config",
    "Phi3ForCausalLM",
    _small,
    _scaled({"qkv_proj": 8.0, "o_proj": 16.0, "lm_head": 8.0}),
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
make_deepseek = _family(
    "DeepseekV2Config",
    "DeepseekV2ForCausalLM",
    _small,
    _scaled({"q_proj": 8.0, "kv_a_proj": 4.0, "kv_b_proj": 8.0, "o_proj": 16.0, "lm_head": 8.0}),
    moe_intermediate_size=64,
    num_hidden_layers=2,
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
)
