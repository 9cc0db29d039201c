# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache groups and registered tensors in the planner's words. Runs in the workers."""

from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from vllm_overlay.config import ConfigError
from vllm_overlay.planner.geometry import Group, GroupKind
from vllm_overlay.transfer.cpu import GroupTensors
from vllm_overlay.transfer.page_map import PageMap, find_page_map

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def group_tensors(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", kv_caches: dict[str, torch.Tensor], match_unit: int
) -> dict[int, GroupTensors]:
    """The registered tensors of each group, with the map that its pages obey (None where they are moved whole)."""
    groups = {}
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        layers = tuple(kv_caches[name] for name in group.layer_names)
        for name, layer in zip(group.layer_names, layers, strict=True):
            if not isinstance(layer, torch.Tensor) or not layer[0].is_contiguous():
                raise ConfigError(
                    f"the KV cache of layer {name} is not one tensor with contiguous pages: this attention backend "
                    "is not supported"
                )
        page_map = None
        if isinstance(_spec(group.kv_cache_spec), AttentionSpec):
            page_map = _common_page_map(vllm_config, group.layer_names, layers)
            if page_map is not None and match_unit % page_map.token_unit:
                page_map = None
        groups[group_id] = GroupTensors(layers, page_map)
    return groups


def planner_groups(kv_cache_config: "KVCacheConfig", tensors: dict[int, GroupTensors]) -> list[Group]:
    """The planner's description of each group."""
    groups = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = _spec(group.kv_cache_spec)
        own = tensors[group_id]
        kind = _kind(spec, group.layer_names[0])
        sliceable = own.page_map is not None
        groups.append(
            Group(
                group_id=group_id,
                kind=kind,
                block_size=spec.block_size,
                token_bytes=own.token_bytes if sliceable else 0,
                page_bytes=own.page_bytes,
                sliceable=sliceable,
                window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0,
            )
        )
    return groups


def page_facts(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", tensors: dict[int, GroupTensors]
) -> tuple[str, ...]:
    """Words for everything that decides what a raw page's bytes mean, in this rank."""
    layers = vllm_config.compilation_config.static_forward_context
    facts = [f"kv_cache_layout={vllm_config.cache_config.kv_cache_layout}"]
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        own = tensors[group_id]
        for name, tensor in zip(group.layer_names, own.layers, strict=True):
            layer = layers[name]
            facts.append(
                f"{name}: {group.kv_cache_spec!r} {tensor.dtype} {tuple(tensor.shape[1:])} "
                f"backend={layer.get_attn_backend().get_name()} isa={getattr(layer, 'isa', None)} "
                f"map={own.page_map.name if own.page_map else None}"
            )
    facts.append(f"cpu={torch.backends.cpu.get_cpu_capability()}")
    return tuple(facts)


def _spec(spec: KVCacheSpec) -> KVCacheSpec:
    """The first layer's spec; vLLM groups layers whose specs agree in all that matters here."""
    return next(iter(iter_layer_specs(spec)))


def _kind(spec: KVCacheSpec, layer_name: str) -> GroupKind:
    if isinstance(spec, MambaSpec):
        return GroupKind.RECURRENT
    if isinstance(spec, SlidingWindowSpec):
        return GroupKind.WINDOW
    if isinstance(spec, FullAttentionSpec):
        return GroupKind.FULL
    raise ConfigError(
        f"layer {layer_name} has a {type(spec).__name__}: HybridOffloadConnector knows full attention, sliding "
        "windows and recurrent states"
    )


def _common_page_map(
    vllm_config: "VllmConfig", layer_names: list[str], layers: tuple[torch.Tensor, ...]
) -> PageMap | None:
    """The page map of a group, when all its layers have the same."""
    first = layers[0]
    if any(layer.shape[1:] != first.shape[1:] or layer.dtype != first.dtype for layer in layers):
        return None
    contexts = vllm_config.compilation_config.static_forward_context
    maps = {_page_map(contexts[name], tensor) for name, tensor in zip(layer_names, layers, strict=True)}
    return maps.pop() if len(maps) == 1 else None


def _page_map(layer: torch.nn.Module, cache: torch.Tensor) -> PageMap | None:
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        return None

    def write(keys: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor, slots: torch.Tensor) -> None:
        update(layer, keys, values, scratch, slots)

    return find_page_map(cache, write)
