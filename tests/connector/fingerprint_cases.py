# SPDX-License-Identifier: Apache-2.0
"""Each row of the table of settings in docs/disk-format.md: changes, and what they change."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator
from vllm.platforms.interface import DeviceCapability

from tests.connector.engine_facts import Settings

BOTH, SNAPSHOT, NONE = "both", "snapshot", "none"
QUANTIZED = {"quantization": "fp8"}
TRAINED_TOKENS = 2048
REGISTERED = "vllm.model_executor.models.ModelRegistry.models"
STATE_DTYPES = "tests.connector.engine_facts.MambaStateDtypeCalculator.gated_delta_net_state_dtype"
KEPT = (torch.bfloat16, torch.float32)
REPLAYED = MambaStateDtypeCalculator.append_replayssm_ring(KEPT, torch.bfloat16)


@dataclass(frozen=True)
class Change:
    """Two engines that differ in one setting."""

    other: Settings
    first: Settings = field(default_factory=Settings)


def arguments(**changed: Any) -> Change:
    """Other arguments of ``EngineArgs`` than none."""
    return Change(Settings(changed))


def environment(**changed: str) -> Change:
    return Change(Settings(environment=changed))


def media(environment: dict[str, str] | None = None, **changed: Any) -> Change:
    return Change(Settings(media=changed, environment=environment or {}), Settings(media={}))


def edit(change: Callable[[VllmConfig], None], **common: Any) -> Change:
    return Change(Settings(common, edit=change), Settings(common))


def put(path: str, value: Any) -> Callable[[VllmConfig], None]:
    """Sets an attribute where ``EngineArgs`` would refuse it on a CPU or without other files."""

    def change(config: VllmConfig) -> None:
        *parents, name = path.split(".")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)

    return change


def drafter(num_tokens: int = 2, drops: bool = True, **changed: Any) -> Settings:
    """An engine whose drafter keeps keys, in the model's checkpoint. ``changed``: of vLLM's configuration of the
    drafter, and then in a checkpoint of its own; ``kv_cache_dtype`` is of the drafter itself."""
    own = {name: changed.pop(name, None) for name in ("kv_cache_dtype", "moe_backend", "index_share_for_mtp_iteration")}

    def change(config: VllmConfig) -> None:
        model = copy.deepcopy(config.model_config)
        if changed:
            model.model += "/."
        for path, value in changed.items():
            put(path.replace("__", "."), value)(model)  # type: ignore[arg-type]
        config.speculative_config = SimpleNamespace(  # type: ignore[assignment]
            use_eagle=lambda: True,
            use_eagle_block_drop=lambda: drops,
            use_multi_module_mtp=lambda: False,
            num_speculative_tokens=num_tokens,
            draft_model_config=model,
            draft_load_config=None,
            **own,
        )

    return Settings(edit=change)


def ngram(**changed: Any) -> Settings:
    """An engine whose drafter keeps nothing."""
    return Settings({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, **changed}})


def rope(length: int | None = None, position_factor: int = 0, **parameters: Any) -> Settings:
    """An engine whose model has these rotary parameters, with that ``--max-model-len``.

    vLLM takes the sections of multimodal positions out of a text model's: ``put`` them there.
    """
    overrides = {"hf_overrides": {"rope_parameters": {"rope_theta": 10000.0, **parameters}}}
    return Settings({**overrides, "max_model_len": length}, position_factor=position_factor)


LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": TRAINED_TOKENS,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
DEFAULT = {"rope_type": "default"}

SET_VARIABLES = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": "1",
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": "1",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": "1",
    "VLLM_FLOAT32_MATMUL_PRECISION": "high",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "int8"}',
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "int8"}',
    "VLLM_HUMMING_USE_F16_ACCUM": "1",
    "VLLM_MARLIN_INPUT_DTYPE": "int8",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": "1",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": "0",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT8",
    "VLLM_ROCM_USE_AITER_FP4BMM": "0",
    "VLLM_ROCM_USE_AITER_FP8BMM": "0",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": "1",
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
}
"""Another value than the default of each variable in ``numerics.PRECISION_VARIABLES``."""

HELD: dict[str, list[Change]] = {
    "weights, `namespace`": [Change(Settings(namespace="mine"))],
    "`config.json`, `--hf-overrides`": [
        arguments(hf_overrides={"rms_norm_eps": 1e-5}),
        arguments(hf_overrides={"hidden_act": "gelu"}),
    ],
    "rotary parameters (`--hf-overrides`)": [
        *(Change(rope(**parameters)) for parameters in (LONG, YARN, DYNAMIC, LLAMA3)),
        Change(rope(**{**YARN, "factor": 4.0}), rope(**YARN)),
        Change(rope(**{**DYNAMIC, "factor": 4.0}), rope(**DYNAMIC)),
        Change(rope(**{**LONG, "long_factor": [8.0] * 16}), rope(**LONG)),
        edit(put("model_config.hf_config.rope_parameters", {**MROPE, "mrope_section": [6, 6, 4]})),
        Change(
            Settings(edit=put("model_config.hf_config.rope_parameters", {**MROPE, "mrope_section": [6, 6, 4]})),
            Settings(edit=put("model_config.hf_config.rope_parameters", MROPE)),
        ),
    ],
    "`--max-model-len` that decides the rotary embedding": [
        Change(rope(2 * TRAINED_TOKENS, **LONG), rope(TRAINED_TOKENS, **LONG)),
        Change(rope(4096, position_factor=1, **DYNAMIC), rope(2048, position_factor=1, **DYNAMIC)),
    ],
    "`--dtype`": [arguments(dtype="float16"), arguments(dtype="float32")],
    "`--quantization`, `--quantization-config`": [
        arguments(**QUANTIZED),
        edit(put("model_config.quantization_config", {"linear": {"weight": "fp8"}})),
    ],
    "`--linear-backend`, `--moe-backend`, the device's capability (quantised weights)": [
        edit(put("kernel_config.linear_backend", "marlin"), **QUANTIZED),
        edit(put("kernel_config.moe_backend", "marlin"), **QUANTIZED),
        edit(put("kernel_config.linear_backend_per_quant", {"fp8": "marlin"}), **QUANTIZED),
        Change(
            Settings(
                QUANTIZED,
                patches={"vllm.platforms.current_platform.get_device_capability": lambda: DeviceCapability(8, 0)},
            ),
            Settings(QUANTIZED),
        ),
    ],
    "`--kv-cache-dtype`, `--kv-cache-dtype-skip-layers`": [
        arguments(kv_cache_dtype="fp8"),
        arguments(kv_cache_dtype="fp8_e5m2"),
        Change(
            Settings({"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["3"]}),
            Settings({"kv_cache_dtype": "fp8"}),
        ),
    ],
    "`--mamba-cache-dtype`, `--mamba-ssm-cache-dtype`": [
        Change(Settings({"mamba_ssm_cache_dtype": "float32"}), Settings({"mamba_ssm_cache_dtype": "bfloat16"})),
        Change(
            Settings({"mamba_ssm_cache_dtype": "float32", "mamba_cache_dtype": "float32"}),
            Settings({"mamba_ssm_cache_dtype": "float32"}),
        ),
        Change(
            Settings(patches={STATE_DTYPES: lambda *_: REPLAYED}), Settings(patches={STATE_DTYPES: lambda *_: KEPT})
        ),
    ],
    "`--enable-mamba-cache-stochastic-rounding`, `--mamba-cache-philox-rounds`": [
        edit(put("mamba_config.enable_stochastic_rounding", True))
    ],
    "`--attention-config`: quantised queries and indexer": [
        edit(put("attention_config.use_prefill_query_quantization", True)),
        edit(put("attention_config.disable_flashinfer_q_quantization", True)),
        edit(put("attention_config.indexer_kv_dtype", "fp8")),
    ],
    "`VLLM_BATCH_INVARIANT`, variables of precision": [
        environment(**{name: value}) for name, value in SET_VARIABLES.items()
    ],
    "`--model-impl`, `--model-class-overrides`, models of plug-ins": [
        arguments(model_impl="transformers"),
        edit(put("model_config.model_class_overrides", {"Qwen3_5ForCausalLM": "other:Model"})),
        Change(Settings(patches={REGISTERED: {"Qwen3_5ForCausalLM": SimpleNamespace(module_name="plugin.model")}})),
    ],
    "`--disable-sliding-window`, groups and their layers": [Change(Settings(window=256))],
    "`--tensor-parallel-size`": [edit(put("parallel_config.tensor_parallel_size", 2))],
    "`--prefix-caching-hash-algo`, `PYTHONHASHSEED`, `--prefix-match-unit`": [
        arguments(prefix_caching_hash_algo="sha256_cbor"),
        environment(PYTHONHASHSEED="17"),
        Change(Settings(match_unit=32), Settings(match_unit=64)),
    ],
    "`--mm-processor-kwargs`, `--media-io-kwargs`, other media settings": [
        media(mm_processor_kwargs={"max_pixels": 1000}),
        media(mm_processor_kwargs={"images_kwargs": {"do_resize": False}}),
        media(media_io_kwargs={"video": {"num_frames": 4}}),
        media(mm_device_do_normalize=False),
        media(mm_encoder_attn_dtype="fp8"),
        media(video_pruning_rate=0.5),
        media({"VLLM_VIDEO_LOADER_BACKEND": "pynvvideocodec"}),
        media({"VLLM_MEDIA_CONNECTOR": "mine"}),
    ],
    "`--speculative-config`: a drafter that keeps keys, its weights, how far it reads ahead": [
        Change(drafter()),
        Change(drafter(drops=False), drafter()),
        Change(drafter(kv_cache_dtype="fp8"), drafter()),
        Change(drafter(dtype=torch.float16), drafter()),
        Change(drafter(hf_config__hidden_act="gelu"), drafter(hf_config__hidden_act="silu")),
    ],
    "`hybrid_chunk_size`, keys, the version of the files": [
        Change(Settings(chunk_size=128)),
        Change(Settings(facts={"integrity": "blake3:00"})),
        Change(Settings(facts={"object_format": 3})),
        Change(Settings(patches={"vllm_overlay.versions.FINGERPRINT": 3})),
    ],
}
"""What both fingerprints hold."""

RAW: dict[str, list[Change]] = {
    "`--block-size`, `--mamba-block-size`": [Change(Settings(block_size=640))],
    "layout of the KV cache": [Change(Settings(layout="LBNHC"))],
    "`--attention-backend`": [Change(Settings(backend="TORCH_SDPA"))],
    "`--gdn-prefill-backend`, as vLLM resolves it": [
        Change(Settings(gdn_prefill="flashinfer")),
        Change(Settings(gdn_prefill="cutedsl"), Settings(gdn_prefill="flashinfer")),
    ],
    "the processor's instructions": [
        Change(Settings(patches={"torch.backends.cpu.get_cpu_capability": lambda: "ANOTHER"}))
    ],
    "`num_speculative_tokens`": [
        Change(drafter(3), drafter(2)),
        arguments(speculative_config={"method": "ngram", "num_speculative_tokens": 2}),
    ],
    "vLLM's version": [Change(Settings(patches={"vllm.__version__": "0.32.1"}))],
}
"""What only the snapshots' fingerprint holds."""

SHARED: dict[str, list[Change]] = {
    "`--max-model-len` otherwise": [
        *(Change(rope(1024, **parameters), rope(2048, **parameters)) for parameters in (DEFAULT, YARN, LLAMA3)),
        Change(
            Settings({"max_model_len": 1024}, edit=put("model_config.hf_config.rope_parameters", MROPE)),
            Settings({"max_model_len": 2048}, edit=put("model_config.hf_config.rope_parameters", MROPE)),
        ),
        Change(rope(1024, **DYNAMIC), rope(2048, **DYNAMIC)),
        Change(rope(TRAINED_TOKENS // 2, **LONG), rope(TRAINED_TOKENS, **LONG)),
        Change(rope(2 * TRAINED_TOKENS, **LONG), rope(TRAINED_TOKENS + 1, **LONG)),
        Change(rope(1024, position_factor=1, **DEFAULT), rope(2048, position_factor=1, **DEFAULT)),
        edit(put("model_config.hf_config.max_model_len", 1024)),
    ],
    "`auto`, and the dtype that it stands for": [
        arguments(kv_cache_dtype="bfloat16"),
        Change(Settings({"kv_cache_dtype": "fp8_e4m3"}), Settings({"kv_cache_dtype": "fp8"})),
        arguments(dtype="bfloat16"),
        Change(
            Settings({"mamba_ssm_cache_dtype": "float32", "mamba_cache_dtype": "bfloat16"}),
            Settings({"mamba_ssm_cache_dtype": "float32"}),
        ),
    ],
    "`--gdn-prefill-backend` that changes nothing": [arguments(gdn_prefill_backend="triton")],
    "`--mamba-backend`, other kernels": [
        edit(put("mamba_config.backend", "flashinfer")),
        edit(put("kernel_config.linear_backend", "torch")),
        edit(put("attention_config.flash_attn_version", 3)),
    ],
    "`--enforce-eager`, `--compilation-config`": [
        arguments(enforce_eager=True),
        arguments(compilation_config={"custom_ops": ["all"]}),
    ],
    "`--max-num-batched-tokens`, `--max-num-seqs`, other scheduling and memory": [
        arguments(max_num_batched_tokens=4096),
        arguments(max_num_seqs=3),
        arguments(prefix_cache_retention_interval=None),
        arguments(num_gpu_blocks_override=100),
    ],
    "`--data-parallel-size`, `--enable-expert-parallel`": [
        edit(put("parallel_config.data_parallel_size", 2)),
        edit(put("parallel_config.enable_expert_parallel", True)),
    ],
    "`--limit-mm-per-prompt`, other limits, caches and paths of media": [
        media(limit_per_prompt={"image": 2}),
        media(language_model_only=True),
        media(mm_processor_cache_gb=0),
        media(mm_encoder_tp_mode="data"),
        media(mm_hasher_algorithm="sha256"),
        media(mm_encoder_attn_backend="TORCH_SDPA"),
    ],
    "`ngram`, `suffix`, `custom_class`": [
        Change(ngram(prompt_lookup_max=3), ngram()),
        Change(ngram(method="custom_class", model="module.Proposer"), ngram()),
    ],
    "sampling, tokenizer, names": [
        arguments(seed=7),
        arguments(generation_config="vllm"),
        arguments(max_logprobs=5),
        arguments(served_model_name="other"),
        arguments(skip_tokenizer_init=True),
    ],
}
"""What neither holds."""
