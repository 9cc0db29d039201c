# SPDX-License-Identifier: Apache-2.0
"""vLLM's settings that change the numbers in a KV cache. Runs in the workers, once the model is there.

docs/disk-format.md has the rule, and a row for each setting. What is at vLLM's default is no fact. So a new fact
changes no digest of an engine that leaves the setting alone.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from vllm_overlay.connector.weights import model_directory

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

PRECISION_VARIABLES: dict[str, object] = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_BATCH_INVARIANT": False,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": False,
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_HUMMING_USE_F16_ACCUM": False,
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": False,
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": True,
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE",
    "VLLM_ROCM_USE_AITER_FP4BMM": True,
    "VLLM_ROCM_USE_AITER_FP8BMM": True,
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": None,
    "VLLM_USE_DEEP_GEMM_E8M0": True,
}
"""Environment variables that say how precise numbers are, or that promise equal bits, and their defaults."""

MEDIA_VARIABLES: dict[str, object] = {"VLLM_MEDIA_CONNECTOR": "http", "VLLM_VIDEO_LOADER_BACKEND": "opencv"}
"""Environment variables that say how media are read. The hashes of media do not say it."""

QUANTIZED_ATTENTION = ("disable_flashinfer_q_quantization", "indexer_kv_dtype", "use_prefill_query_quantization")
KERNELS_OF_QUANTIZED_MODELS = ("linear_backend", "linear_backend_per_quant", "moe_backend")
"""Settings that decide, for quantised weights, whether a layer's input is quantised too."""

_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "tekken.json",
    "video_preprocessor_config.json",
)
"""Files that say how images, videos and sounds become a model's input, for example how many pixels an image may
have."""

NO_FACTS_OF_MEDIA = {
    "allow_missing_mm_embeddings", "enable_mm_embeds", "interleave_mm_strings", "language_model_only",
    "limit_per_prompt", "mm_encoder_attn_backend", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_margin",
    "mm_encoder_fp8_scale_save_path", "mm_encoder_only", "mm_encoder_tp_mode", "mm_hasher_algorithm",
    "mm_ipc_gpu_memory_gb", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc", "skip_mm_profiling",
}  # fmt: skip
"""Fields of vLLM's ``MultiModalConfig`` that change no number, or that change tokens and hashes too. All others are
facts."""

_ROTATIONS_OF_THE_CONFIGURATION = {
    "BailingMRotaryEmbedding", "DeepseekScalingRotaryEmbedding", "DeepseekV4ScalingRotaryEmbedding",
    "DualChunkRotaryEmbedding", "DynamicNTKAlphaRotaryEmbedding", "Gemma4RotaryEmbedding",
    "LinearScalingRotaryEmbedding", "Llama3RotaryEmbedding", "Llama4VisionRotaryEmbedding", "MRotaryEmbedding",
    "MRotaryEmbeddingInterleaved", "NTKScalingRotaryEmbedding", "RotaryEmbedding", "YaRNScalingRotaryEmbedding",
}  # fmt: skip
"""Rotary embeddings in which a position's rotation follows from the model's configuration. Other limits only give
longer tables."""

_HOW_A_ROTATION_IS_COMPUTED = {"training", "use_flashinfer", "use_aiter"}


def numeric_facts(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> dict[str, Any]:
    """The facts by name. Those that say nothing are left out."""
    model, cache, mamba = vllm_config.model_config, vllm_config.cache_config, vllm_config.mamba_config
    facts = {
        "attention": _differing(vllm_config.attention_config, QUANTIZED_ATTENTION),
        "environment": _variables(PRECISION_VARIABLES),
        "implementation": _implementation(model),
        "kernels": _kernels(vllm_config),
        "multimodal": _multimodal(model),
        "quantization_config": model.quantization_config,
        "rotary": rotary_facts(),
        "skip_layers": sorted(cache.kv_cache_dtype_skip_layers),
        "state_rounding": (
            ["stochastic", mamba.stochastic_rounding_philox_rounds] if mamba.enable_stochastic_rounding else []
        ),
        "states": _states(kv_cache_config),
    }
    return {name: value for name, value in facts.items() if value}


def cache_dtype(vllm_config: "VllmConfig") -> str:
    """The dtype that keys and values are kept in. ``auto`` where it is the model's own, however that was said."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    model, name = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    if kv_cache_dtype_str_to_dtype(name, model) == model.dtype:
        return "auto"
    return "fp8" if name == "fp8_e4m3" else name


def _states(kv_cache_config: "KVCacheConfig") -> list[str]:
    """The dtypes that recurrent states are kept in. Attention above them depends on it."""
    from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    found = {f"{spec.mamba_type}: {', '.join(map(str, spec.dtypes))}" for spec in specs if isinstance(spec, MambaSpec)}
    return sorted(found)


def rotary_facts() -> list[dict[str, Any]]:
    """The rotary embeddings of this process that the model's configuration alone does not decide, as vLLM made them.

    LongRoPE takes its long factors if ``max_model_len`` is above the trained length. Some models make tables of dynamic
    scaling for ``max_model_len``. A class that nobody has looked at counts as such.
    """
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    found = [
        {"class": type(module).__name__, **_plain_values(module)}
        for module in _ROPE_DICT.values()
        if type(module).__name__ not in _ROTATIONS_OF_THE_CONFIGURATION
    ]
    return sorted(found, key=str)


def _plain_values(module: object) -> dict[str, Any]:
    """All plain values that a module was given or has worked out."""
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | int | float | str | list | tuple)
        and not name.startswith("_")
        and name not in _HOW_A_ROTATION_IS_COMPUTED
    }


def _implementation(model: "ModelConfig") -> list[Any]:
    """The code that computes the model, where it is not vLLM's own for that model."""
    from vllm.model_executor.models import ModelRegistry

    registered = ModelRegistry.models.get(model.architecture)
    module = getattr(registered, "module_name", None) or getattr(registered, "model_cls", object).__module__
    is_own = model.architecture in model.architectures and module.startswith("vllm.")
    if is_own and not model.model_class_overrides:
        return []
    return [model.architecture, module, model.model_class_overrides]


def _kernels(vllm_config: "VllmConfig") -> dict[str, Any]:
    """What decides, for quantised weights, whether the input of a layer is quantised too."""
    from vllm.platforms import current_platform

    if vllm_config.model_config.quantization is None:
        return {}
    chosen = _differing(vllm_config.kernel_config, KERNELS_OF_QUANTIZED_MODELS)
    return {**chosen, "device": f"{current_platform.device_type} {current_platform.get_device_capability()}"}


def _multimodal(model: "ModelConfig") -> dict[str, Any]:
    """How media become a model's input, as far as their hashes do not say it."""
    config = model.multimodal_config
    if config is None:
        return {}
    directory = model_directory(model.model, model.revision)
    found = [directory / name for name in _PROCESSOR_FILES] if directory else []
    names, scales = sorted(vars(config).keys() - NO_FACTS_OF_MEDIA), config.mm_encoder_fp8_scale_path
    facts = {
        "settings": _differing(config, [name for name in names if not name.startswith("_")]),
        "scales": _file_digest(Path(scales)) if scales else "",
        "processor": {path.name: _file_digest(path) for path in found if path.is_file()},
        "environment": _variables(MEDIA_VARIABLES),
    }
    return {name: value for name, value in facts.items() if value}


def _file_digest(path: Path) -> str:
    return blake3(path.read_bytes()).hexdigest()


def _differing(config: Any, names: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """Fields of a config that differ from vLLM's defaults."""
    default = type(config)()
    return {
        name: getattr(config, name)
        for name in names
        if (getattr(config, name) or None) != (getattr(default, name) or None)
    }


def _variables(defaults: dict[str, object]) -> dict[str, object]:
    from vllm import envs

    return {name: getattr(envs, name) for name, default in defaults.items() if getattr(envs, name) != default}
