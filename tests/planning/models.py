# SPDX-License-Identifier: Apache-2.0
"""Small config.json files of published models: what decides their KV cache, from their model cards and configurations.

Qwen3.5-0.8B: 24 layers, GDN of 16 value heads, 2 KV heads. Qwen3.6-27B: 64 layers, 48 value heads, 4 KV heads.
Qwen3.5-35B-A3B: 40 layers, 32 value heads, 2 KV heads. In all of them one layer in four has full attention of head size
256, and the others GDN with 16 key heads, heads of 128 dimensions, a convolution over 4 tokens and float32 states.
"""

import json
from pathlib import Path
from typing import Any

from tools.tiny_model import configuration


def _qwen(model_type: str, *, hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
    text = {
        "model_type": f"{model_type}_text",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
    }
    return {"model_type": model_type, "text_config": text}


QWEN_0_8B = _qwen("qwen3_5", hidden=1024, layers=24, heads=8, kv_heads=2, value_heads=16)
QWEN_27B = _qwen("qwen3_5", hidden=5120, layers=64, heads=24, kv_heads=4, value_heads=48)
QWEN_35B = _qwen("qwen3_5_moe", hidden=2048, layers=40, heads=16, kv_heads=2, value_heads=32)
TINY = {"model_type": "qwen3_5_text", "dtype": "bfloat16", **configuration(8192, num_layers=4)}
LLAMA = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    """A directory with this config.json and nothing else."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
