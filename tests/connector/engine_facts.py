# SPDX-License-Identifier: Apache-2.0
"""The fingerprints of an engine that is not started, from vLLM's own configuration, specs and rotary embedding."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import MultiModalConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_overlay.connector.fingerprint import compute_fingerprints
from vllm_overlay.connector.kv_cache_groups import page_facts
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.tiers.base import Fingerprints
from vllm_overlay.transfer.group_tensors import GroupTensors

MATCH_UNIT = 64


@dataclass(frozen=True)
class Settings:
    """What an engine is started with, as far as a test says. ``edit`` changes what vLLM has made of it."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of ``EngineArgs``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    media: Mapping[str, Any] | None = None
    """Of ``MultiModalConfig``; None for a model of text."""
    edit: Callable[[VllmConfig], None] = lambda _: None
    patches: Mapping[str, Any] = field(default_factory=dict)
    """Module attributes to replace once vLLM has made its configuration."""
    position_factor: int = 0
    """The model makes its rotary embedding for so many times ``max_model_len``; 0: for the model's own length."""
    window: int = 0
    block_size: int = 1152
    chunk_size: int = 64
    match_unit: int = MATCH_UNIT
    layout: str = "LBHNC"
    backend: str = "CPU_ATTN"
    gdn_prefill: str = "triton"
    """What the recurrent layer has made of ``--gdn-prefill-backend``."""
    namespace: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The tier's own."""


def fingerprints(model: Path, settings: Settings) -> Fingerprints:
    """Those that every worker of such an engine computes."""
    with ExitStack() as stack:
        root = stack.enter_context(TemporaryDirectory())
        stack.enter_context(patch.dict(os.environ, settings.environment))
        stack.enter_context(patch.object(rotary_embedding, "_ROPE_DICT", {}))
        config = vllm_config(model, settings)
        for target, value in settings.patches.items():
            stack.enter_context(patch(target, value))
        _make_rotary_embedding(config, settings)
        groups = _kv_cache_config(config, settings)
        return compute_fingerprints(
            config,
            groups,
            _geometry(groups, settings),
            page_facts(config, groups, {index: _tensors(group) for index, group in enumerate(groups.kv_cache_groups)}),
            {},
            settings.namespace,
            Path(root),
            settings.facts,
        )


def vllm_config(model: Path, settings: Settings) -> VllmConfig:
    """What vLLM makes of the settings."""
    config = EngineArgs(model=str(model), **settings.arguments).create_engine_config()
    if settings.media is not None:
        config.model_config.multimodal_config = MultiModalConfig(**settings.media)
    config.cache_config.kv_cache_layout = settings.layout
    settings.edit(config)
    return config


def _make_rotary_embedding(config: VllmConfig, settings: Settings) -> None:
    """As a model does while it is made."""
    hf = config.model_config.hf_config
    length = settings.position_factor * config.model_config.max_model_len or hf.max_position_embeddings
    with set_current_vllm_config(config):
        rotary_embedding.get_rope(
            hf.head_dim, length, rope_parameters=hf.rope_parameters, dtype=config.model_config.dtype
        )


def _kv_cache_config(config: VllmConfig, settings: Settings) -> KVCacheConfig:
    """One recurrent group and one of attention, with the dtypes that vLLM resolves."""
    model, cache = config.model_config, config.cache_config
    dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    block_size = settings.block_size
    attention: AttentionSpec
    plain: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": kv_cache_dtype_str_to_dtype(cache.cache_dtype, model),
    }
    attention = (
        SlidingWindowSpec(**plain, sliding_window=settings.window) if settings.window else FullAttentionSpec(**plain)
    )
    columns = 3 + config.num_speculative_tokens
    states = MambaSpec(block_size=block_size, shapes=((columns, 8), (4, 8, 8)), dtypes=dtypes, mamba_cache_mode="align")
    groups = [KVCacheGroupSpec(["layers.0"], states), KVCacheGroupSpec(["layers.3"], attention)]
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: settings.backend))
    recurrent = SimpleNamespace(**vars(layer), gdn_prefill_backend=settings.gdn_prefill)
    config.compilation_config.static_forward_context.update({"layers.0": recurrent, "layers.3": layer})
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)


def _tensors(group: KVCacheGroupSpec) -> GroupTensors:
    return GroupTensors((torch.zeros(1, 2, group.kv_cache_spec.block_size, 64, dtype=torch.bfloat16),), None)


def _geometry(groups: KVCacheConfig, settings: Settings) -> Geometry:
    size, window = settings.block_size, settings.window
    kind = GroupKind.WINDOW if window else GroupKind.FULL
    planned = [Group(0, GroupKind.RECURRENT, size, 0, 1000, False), Group(1, kind, size, 256, 256 * size, True, window)]
    return Geometry.build(planned, settings.match_unit, settings.chunk_size)
