# SPDX-License-Identifier: Apache-2.0
"""What EngineCore does to the block size of a hybrid model: aligned by the workers, then __post_init__ once more."""

import json
import tempfile
from pathlib import Path

SYMPTOM = "the second __post_init__ puts 128 in the place of the unified block size"


def model_directory(parent: Path) -> Path:
    """A hybrid model's configuration; no weights are needed to find its block size."""
    text = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 8192,
        "dtype": "bfloat16",
    }
    (parent / "config.json").write_text(json.dumps(text))
    return parent


def main() -> None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    with tempfile.TemporaryDirectory() as directory:
        model = model_directory(Path(directory))
        config = EngineArgs(model=str(model), skip_tokenizer_init=True, max_model_len=8192).create_engine_config()
        first = config.cache_config.block_size
        current_platform._align_hybrid_block_size(config, CPUAttentionBackend)
        unified = config.cache_config.block_size
        config.__post_init__()
        again = config.cache_config.block_size
    seen = {"vllm": vllm.__file__, "first": first, "unified": unified, "again": again}
    print(json.dumps({"symptom": again == 128 and unified > 128, "healthy": first == 128 and again == unified, **seen}))


if __name__ == "__main__":
    main()
