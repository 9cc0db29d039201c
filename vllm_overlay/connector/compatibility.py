# SPDX-License-Identifier: Apache-2.0
"""What is refused at start, one sentence each, before it can go wrong."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.base import TierSpec

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def states_end_with_requests(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether vLLM keeps a recurrent state only while its request runs (``mamba_cache_mode`` "none"). That is the mode
    of every such model without a prefix cache. Nothing can be restored then: a connector is idle."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    return any(isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "none" for spec in specs)


def check_supported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", spec: TierSpec[Any]) -> None:
    """Called when a HybridOffloadConnector is built, in every process; raises ConfigError."""
    if what := next(unsupported(vllm_config), ""):
        raise ConfigError(f"HybridOffloadConnector does not support {what}")
    if states_end_with_requests(kv_cache_config):
        return  # The connector is idle: what its objects would need does not matter.
    _check_prefix_cache(vllm_config)
    _check_groups(kv_cache_config)
    if spec.outlives_engine:
        check_keys_survive_restart(vllm_config)


def unsupported(vllm_config: "VllmConfig") -> Iterator[str]:
    """What of an engine is not supported, and what to change, in words that follow "does not support"."""
    from vllm.platforms import current_platform

    parallel, device = vllm_config.parallel_config, vllm_config.device_config.device_type
    if vllm_config.speculative_config is not None:
        yield from _unsupported_speculation(vllm_config.speculative_config)
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline parallelism yet: set --pipeline-parallel-size 1"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism yet: set --decode-context-parallel-size 1 and --prefill-context-parallel-size 1"
    if vllm_config.max_concurrent_batches > 1 and not vllm_config.kv_transfer_config.is_kv_consumer:
        yield (
            'kv_role "kv_producer" with asynchronous scheduling, because vLLM would let it load into blocks that a '
            'step still writes: set kv_role to "kv_both" or --no-async-scheduling'
        )
    if device == "cpu":
        return
    if current_platform.is_rocm():  # whose devices vLLM calls "cuda"
        yield "ROCm, where it was never run: remove it, or use the CPU build of vLLM"
    if device != "cuda":
        yield f"{device!r}, where it was never run: remove it, or use a build of vLLM for CPUs or CUDA"
    if vllm_config.model_config.enable_sleep_mode:
        yield (
            "sleep mode yet, which takes the KV cache away while a load may still write to it: remove "
            "--enable-sleep-mode"
        )


SPECULATIVE_METHODS = ("ngram", "suffix", "custom_class", "mtp", "eagle", "eagle3")


def _unsupported_speculation(config: "SpeculativeConfig") -> Iterator[str]:
    if config.method not in SPECULATIVE_METHODS:
        yield (
            f"speculative method {config.method!r}, which was never run: set method in --speculative-config to one of "
            f"{', '.join(SPECULATIVE_METHODS)}"
        )
    elif config.parallel_drafting:
        yield "parallel drafting, which was never run: set parallel_drafting in --speculative-config to false"
    elif config.method == "mtp" and _num_modules(config) > 1 and config.num_speculative_tokens > 1:
        yield "several MTP modules, which were never run: set num_speculative_tokens in --speculative-config to 1"


def _num_modules(config: "SpeculativeConfig") -> int:
    found = vars(config.draft_model_config.hf_config)
    return max(found.get(name) or 1 for name in ("n_predict", "num_nextn_predict_layers"))


def _check_prefix_cache(vllm_config: "VllmConfig") -> None:
    if not vllm_config.cache_config.enable_prefix_caching:
        why = ""
        if vllm_config.model_config.use_mla:
            why = " (vLLM's CPU platform switches it off for MLA where the processor has no AMX)"
        raise ConfigError(f"HybridOffloadConnector needs the prefix cache: set --enable-prefix-caching{why}")


def _check_groups(kv_cache_config: "KVCacheConfig") -> None:
    for group in kv_cache_config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "align":
                raise ConfigError(
                    f"mamba_cache_mode={spec.mamba_cache_mode!r} keeps no reusable states: set --mamba-cache-mode align"
                )
            if not spec.prefix_cacheable:
                raise ConfigError(
                    f"layers {group.layer_names[0]}... have a {type(spec).__name__}, which has no reusable prefix: "
                    "HybridOffloadConnector cannot serve this model"
                )


def check_keys_survive_restart(vllm_config: "VllmConfig") -> None:
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("sha256") and os.getenv("PYTHONHASHSEED") is None:
        raise ConfigError(
            f"--prefix-caching-hash-algo {algorithm} is seeded at random in every process, so nothing that is stored "
            "could be found again: set PYTHONHASHSEED to a fixed number or use --prefix-caching-hash-algo sha256"
        )
