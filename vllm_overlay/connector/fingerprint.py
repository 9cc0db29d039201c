# SPDX-License-Identifier: Apache-2.0
"""What the numbers on disk depend on: two digests, one for attention chunks, one for snapshots.

Attention chunks are stored in one canonical order. So their fingerprint names only what changes the numbers, and for
opaque cells also what a cell is. Snapshots are raw pages. Their fingerprint adds how the pages are laid out, and by
which backend and vLLM version.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from vllm_overlay import versions
from vllm_overlay.config import ConfigError
from vllm_overlay.connector.lookahead import lookahead_units
from vllm_overlay.connector.numerics import cache_dtype, numeric_facts
from vllm_overlay.connector.weights import safetensors_files, weights_digest
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tiers.base import Fingerprints

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "max_model_len"}
"""Fields of a model's configuration that change no number. Some models write the last one there while they load."""

_DRAFTER_SETTINGS = ("kv_cache_dtype", "moe_backend", "index_share_for_mtp_iteration")
"""Of ``SpeculativeConfig``, None by default."""


def compute_fingerprints(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    geometry: Geometry,
    page_facts: tuple[str, ...],
    cell_facts: Mapping[int, str],
    weights_name: str,
    cache_directory: Path,
    facts: Mapping[str, Any],
) -> Fingerprints:
    """The fingerprints of this engine's objects. Called by a tier in every worker, at start.

    From ``weights_name`` on the arguments are the tier's: see ``Fingerprinter``. The weights are read at most once.

    Args:
        page_facts: Everything that decides what a raw page's bytes mean.
        cell_facts: For each group that is cut in opaque cells, their order and what is in one. The other groups have
            the canonical order of keys and values, and no fact.
    """
    import vllm

    weights = weights_identity(vllm_config.model_config, vllm_config.load_config, weights_name, cache_directory)
    cache = vllm_config.cache_config
    groups = [
        {
            "tag": geometry.tag(group),
            "layers": list(kv_cache_config.kv_cache_groups[group.group_id].layer_names),
            "token_bytes": group.token_bytes,
            "whole_pages": None if geometry.is_splittable(group) else page_facts,
            **({"cells": cell_facts[group.group_id]} if group.group_id in cell_facts else {}),
        }
        for group in geometry.attention
    ]
    attention = {
        "format": versions.FINGERPRINT,
        "weights": weights,
        **model_facts(vllm_config.model_config),
        "cache_dtype": cache_dtype(vllm_config),
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "hash": [cache.prefix_caching_hash_algo, os.getenv("PYTHONHASHSEED"), geometry.match_unit],
        "chunk_size": geometry.chunk_size,
        "groups": groups,
        **numeric_facts(vllm_config, kv_cache_config),
        **_drafter_facts(vllm_config, geometry, weights_name, cache_directory),
        **facts,
    }
    snapshot = {**attention, "vllm": vllm.__version__, "pages": page_facts}
    description = {"model": str(vllm_config.model_config.model), **snapshot}
    return Fingerprints(_digest(attention), _digest(snapshot), description)


def _drafter_facts(
    vllm_config: "VllmConfig", geometry: Geometry, weights_name: str, cache_directory: Path
) -> dict[str, Any]:
    """What keys and values of a drafter depend on, and what names cover for it. Nothing without a drafter that has
    some."""
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    if speculative is None or not speculative.use_eagle():
        return {}
    draft = speculative.draft_model_config
    settings = {name: getattr(speculative, name) for name in _DRAFTER_SETTINGS}
    facts: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if (draft.model, draft.quantization) != (model.model, model.quantization):
        load = speculative.draft_load_config or vllm_config.load_config
        facts |= {"weights": weights_identity(draft, load, weights_name, cache_directory), **model_facts(draft)}
        facts["config"].pop("model", None)  # which EAGLE's configuration repeats, with the path it came from
    return {"drafter": {**facts, "lookahead": lookahead_units(vllm_config, geometry.match_unit)}}


def model_facts(model: "ModelConfig") -> dict[str, Any]:
    """What the model's configuration says of the numbers."""
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE}
    return {"config": config, "dtype": str(model.dtype), "quantization": model.quantization}


def _digest(facts: dict[str, Any]) -> str:
    return blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def weights_identity(model: "ModelConfig", load: "LoadConfig", name: str, cache_directory: Path) -> str:
    """``name`` stands for the weights, or else the digest of their files. Raises ConfigError where there are none."""
    if name:
        return f"namespace:{name} revision:{model.revision}"
    files = safetensors_files(model.model, model.revision) if load.load_format in ("auto", "safetensors") else []
    if not files:
        raise ConfigError(
            f"the weights of {model.model} (load format {load.load_format}) are not safetensors files on this machine, "
            "so the disk tier cannot tell them from others: set namespace to a name for exactly these weights, "
            'such as "my-model-2026-11"'
        )
    return weights_digest(files, cache_directory / "weights.json")
