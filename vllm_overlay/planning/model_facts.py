# SPDX-License-Identifier: Apache-2.0
"""What a model's ``config.json`` says of its KV cache and its recurrent states. Reads no weights and no network."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_overlay.config import ConfigError

GATED_DELTA_NET = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
FULL_ATTENTION = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types that the formula knows, by their ``model_type``."""


@dataclass(frozen=True, slots=True)
class StateFacts:
    """The recurrent states of one layer, all ranks together. ``dtype`` is empty where the configuration names none."""

    num_layers: int
    convolution_elements: int
    recurrent_elements: int
    num_value_heads: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """``num_layers`` have full attention; ``states`` is None for a model without recurrent layers."""

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str
    max_model_len: int
    states: StateFacts | None


def read_config(model: str) -> dict[str, Any]:
    """The ``config.json`` of a directory, or of a name in transformers' local cache. Raises ConfigError."""
    path = Path(model) / "config.json" if Path(model).is_dir() else _cached(model)
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a model's configuration: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no model's configuration: it must be a JSON object")
    return config


def _cached(model: str) -> Path:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise ConfigError(f"{model} is no directory: give the one that has its config.json") from error
    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise ConfigError(
            f"{model} is neither a directory nor in the local cache of transformers: give the directory of its "
            f"config.json, or load it once with `hf download {model} config.json`"
        )
    return Path(found)


def facts_of(config: Mapping[str, Any]) -> ModelFacts:
    """Raises ConfigError for a model that the formula does not know."""
    text = config.get("text_config", config)
    model_type = str(text.get("model_type") or config.get("model_type"))
    if model_type not in GATED_DELTA_NET + FULL_ATTENTION:
        raise ConfigError(
            f"the formula does not know models of type {model_type!r}, only {', '.join(GATED_DELTA_NET)} and "
            f"{', '.join(FULL_ATTENTION)}: run this where vLLM is installed for that platform"
        )
    try:
        return _facts(config, text, model_type)
    except KeyError as error:
        raise ConfigError(f"the model's configuration has no {error.args[0]!r}") from error


def _facts(config: Mapping[str, Any], text: Mapping[str, Any], model_type: str) -> ModelFacts:
    layer_types = _layer_types(text, model_type)
    if unknown := set(layer_types) - {"full_attention", "linear_attention"}:
        raise ConfigError(f"the formula does not know layers of type {sorted(unknown)[0]!r}: see --platform cpu")
    if text.get("sliding_window") and text.get("use_sliding_window", model_type not in FULL_ATTENTION[1:]):
        raise ConfigError("the formula does not know sliding windows: run this where vLLM is installed")
    num_heads = text["num_attention_heads"]
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return ModelFacts(
        model_type=model_type,
        num_layers=layer_types.count("full_attention"),
        num_kv_heads=text.get("num_key_value_heads") or num_heads,
        head_size=text.get("head_dim") or text["hidden_size"] // num_heads,
        dtype=str(dtype or "bfloat16"),
        max_model_len=text["max_position_embeddings"],
        states=_states(text, layer_types.count("linear_attention")) if model_type in GATED_DELTA_NET else None,
    )


def _layer_types(text: Mapping[str, Any], model_type: str) -> list[str]:
    num_layers = text["num_hidden_layers"]
    if named := text.get("layer_types"):
        return list(named)
    if model_type in FULL_ATTENTION:
        return ["full_attention"] * num_layers
    interval = text.get("full_attention_interval", 4)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]


def _states(text: Mapping[str, Any], num_layers: int) -> StateFacts:
    """Of a gated delta net: the last inputs of its convolution, and a matrix for each value head."""
    key_size, value_size = text["linear_key_head_dim"], text["linear_value_head_dim"]
    num_value_heads = text["linear_num_value_heads"]
    width = 2 * text["linear_num_key_heads"] * key_size + num_value_heads * value_size
    return StateFacts(
        num_layers=num_layers,
        convolution_elements=(text["linear_conv_kernel_dim"] - 1) * width,
        recurrent_elements=num_value_heads * value_size * key_size,
        num_value_heads=num_value_heads,
        dtype=str(text.get("mamba_ssm_dtype") or ""),
    )
