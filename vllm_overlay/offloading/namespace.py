# SPDX-License-Identifier: Apache-2.0
"""What the bytes in vLLM's rows depend on: the namespace of a secondary tier's objects."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from vllm_overlay.connector.compatibility import check_keys_survive_restart
from vllm_overlay.connector.fingerprint import model_facts, weights_identity
from vllm_overlay.connector.numerics import cache_dtype, numeric_facts
from vllm_overlay.offloading.connector import ServedEngine
from vllm_overlay.offloading.settings import check_engine
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

_FORMAT = 1
"""Of these facts."""


def namespace_of(
    engine: ServedEngine,
    offloading: "OffloadingConfig",
    row_bytes: int,
    weights_name: str,
    root: Path,
    tier_facts: Mapping[str, Any],
) -> DiskNamespace:
    """Called once, at start, in the scheduler's process. Raises ConfigError where weights cannot be told apart.

    A row is pages as vLLM's worker copies them, so all that decides their layout is a fact: vLLM's version, the device,
    and the length up to which a rotation may depend on ``max_model_len``. Too many facts cost hits after a change of a
    setting. One too few would load wrong numbers.

    Args:
        row_bytes: Of one chunk of one group, all ranks together.
        weights_name, root, tier_facts: see ``Fingerprinter``.
    """
    vllm_config, parallel = engine.vllm_config, offloading.parallel
    check_keys_survive_restart(vllm_config)
    check_engine(vllm_config)
    groups = engine.kv_cache_config.kv_cache_groups
    facts = {
        "rows": _FORMAT,
        "weights": weights_identity(vllm_config.model_config, vllm_config.load_config, weights_name, root),
        **model_facts(vllm_config.model_config),
        "max_model_len": vllm_config.model_config.max_model_len,
        "cache_dtype": cache_dtype(vllm_config),
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "hash": [
            vllm_config.cache_config.prefix_caching_hash_algo,
            os.getenv("PYTHONHASHSEED"),
            offloading.cache.tokens_per_hash,
        ],
        "row": [row_bytes, offloading.cache.blocks_per_chunk],
        "layout": [offloading.kv_cache_layout, offloading.canonical_layout, offloading.replicated_layout],
        "groups": [[list(group.layer_names), str(group.kv_cache_spec)] for group in groups],
        "attention_backend": str(vllm_config.attention_config.backend),
        "device": _device(),
        **numeric_facts(vllm_config, engine.kv_cache_config),
        **tier_facts,
    }
    digest = blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return DiskNamespace(digest, digest, {"model": str(vllm_config.model_config.model), **facts})


def _device() -> list[str]:
    """What picks kernels and layouts: vLLM's version, the device, and on a CPU what it can do."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    device = [vllm.__version__, current_platform.device_type, str(current_platform.get_device_name())]
    if current_platform.is_cpu():
        return [*device, torch.backends.cpu.get_cpu_capability(), str(torch.cpu._is_amx_tile_supported())]
    return [*device, str(current_platform.get_device_capability())]
