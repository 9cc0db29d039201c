# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache groups and registered tensors in the planner's words. Runs in the workers."""

import copy
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
    iter_layer_specs,
)

from vllm_overlay.config import ConfigError
from vllm_overlay.planner.geometry import Group, GroupKind
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_check import CacheWrite, TokenShape, find_page_map
from vllm_overlay.transfer.page_map import CellMap, PageMap

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


def group_tensors(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", kv_caches: dict[str, torch.Tensor], match_unit: int
) -> dict[int, GroupTensors]:
    """The registered tensors of each group, with the map that its pages obey (None where they are moved whole). Raises
    ConfigError for a layer that can be neither cut nor copied whole."""
    groups = {}
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            _check_copyable(name, kv_caches[name], kv_cache_config.num_blocks)
        registered = [kv_caches[name] for name in group.layer_names]
        spec, page_map = _spec(group.kv_cache_spec), None
        if isinstance(spec, AttentionSpec):
            page_map = _common_page_map(vllm_config, group.layer_names, registered, spec, kv_cache_config.num_blocks)
            if page_map is not None and match_unit % page_map.token_unit:
                page_map = None
        layers = tuple(group_kernel_blocks(cache, kv_cache_config.num_blocks) for cache in registered)
        groups[group_id] = GroupTensors(layers, page_map)
    return groups


def planner_groups(kv_cache_config: "KVCacheConfig", tensors: dict[int, GroupTensors]) -> list[Group]:
    """The planner's description of each group."""
    groups = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = _spec(group.kv_cache_spec)
        own = tensors[group_id]
        groups.append(
            Group(
                group_id=group_id,
                kind=_kind(group),
                block_size=spec.block_size,
                token_bytes=own.token_bytes if own.page_map is not None else 0,
                page_bytes=own.page_bytes,
                sliceable=own.page_map is not None,
                window=_window(spec),
                is_chunked=isinstance(spec, ChunkedLocalAttentionSpec),
            )
        )
    return groups


def page_facts(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", tensors: dict[int, GroupTensors]
) -> tuple[str, ...]:
    """In words: everything that decides what a raw page's bytes mean, in this rank."""
    layers = vllm_config.compilation_config.static_forward_context
    facts = [f"kv_cache_layout={vllm_config.cache_config.kv_cache_layout}"]
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        own = tensors[group_id]
        for name, tensor in zip(group.layer_names, own.layers, strict=True):
            layer = layers[name]
            facts.append(
                f"{name}: {group.kv_cache_spec!r} {tensor.dtype} {tuple(tensor.shape[1:])} "
                f"backend={layer.get_attn_backend().get_name()} isa={getattr(layer, 'isa', None)} "
                f"map={own.page_map.name if own.page_map else None}{_prefill_kernel(layer)}"
            )
    facts.append(_processor(tensors[0].layers[0].device))
    return tuple(facts)


def _processor(device: torch.device) -> str:
    """What chooses the kernels."""
    if device.type == "cpu":
        return f"cpu={torch.backends.cpu.get_cpu_capability()}"
    return f"{device.type}={torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"


def _prefill_kernel(layer: Any) -> str:
    """The kernel that computes the states of a prompt, where it is not vLLM's own Triton kernel. ``auto`` means another
    one by the device (FlashInfer's on SM90). Layers that have such a choice say what was chosen."""
    found = getattr(layer, "gdn_prefill_backend", "triton")
    return "" if found == "triton" else f" prefill={found}"


def cell_facts(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", tensors: dict[int, GroupTensors]
) -> dict[int, str]:
    """For each group that is cut in cells: their order, and who says what is in one."""
    layers = vllm_config.compilation_config.static_forward_context
    facts = {}
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        own = tensors[group_id]
        if isinstance(own.page_map, CellMap):
            backends = sorted({layers[name].get_attn_backend().get_name() for name in group.layer_names})
            first = own.layers[0]
            facts[group_id] = (
                f"{own.page_map.order}: {first.shape[-3]} x {first.shape[-1]} {first.dtype} by {', '.join(backends)}"
            )
    return facts


def _check_copyable(name: str, cache: object, num_blocks: int) -> None:
    """A page can be copied whole when its innermost elements lie side by side."""
    is_one = isinstance(cache, torch.Tensor) and cache.dim() >= 2 and cache.stride(-1) == 1
    if not is_one or cache.shape[0] % num_blocks:  # type: ignore[attr-defined]
        raise ConfigError(
            f"the KV cache of layer {name} is not one tensor of {num_blocks} blocks with contiguous rows: this "
            "attention backend is not supported"
        )


def _spec(spec: KVCacheSpec) -> KVCacheSpec:
    """The first layer's spec; vLLM groups layers whose specs agree in all that matters here."""
    return next(iter(iter_layer_specs(spec)))


_KINDS: dict[type[KVCacheSpec], tuple[GroupKind, str]] = {
    FullAttentionSpec: (GroupKind.FULL, ""),
    MLAAttentionSpec: (GroupKind.FULL, ""),
    SlidingWindowSpec: (GroupKind.WINDOW, "sliding_window"),
    SlidingWindowMLASpec: (GroupKind.WINDOW, "sliding_window"),
    ChunkedLocalAttentionSpec: (GroupKind.WINDOW, "attention_chunk_size"),
    MambaSpec: (GroupKind.RECURRENT, ""),
}
"""Kinds by the very class, and the field that says how many tokens a layer sees at most. A subclass is another kind of
attention: R-SWA forgets answers, sinks precede the prompt."""


def _kind(group: "KVCacheGroupSpec") -> GroupKind:
    """The kind of a group's layers; raises ConfigError for a layer of a kind that is not known."""
    own = group.kv_cache_spec
    specs = own.kv_cache_specs if isinstance(own, UniformTypeKVCacheSpecs) else {group.layer_names[0]: own}
    for name, spec in specs.items():
        if type(spec) not in _KINDS:
            raise ConfigError(
                f"layer {name} has a {type(spec).__name__}: HybridOffloadConnector knows full attention, sliding "
                "windows, chunked local attention, MLA and recurrent states"
            )
    return _KINDS[type(_spec(own))][0]


def _window(spec: KVCacheSpec) -> int:
    """Tokens that a layer sees at most; 0 where that is all of them."""
    kind, field = _KINDS[type(spec)]
    return int(getattr(spec, field)) if kind is GroupKind.WINDOW else 0


def _common_page_map(
    vllm_config: "VllmConfig", layer_names: list[str], layers: list[torch.Tensor], spec: AttentionSpec, num_blocks: int
) -> PageMap | None:
    """The page map of a group, when all its layers have the same. ``layers`` are as registered."""
    first = layers[0]
    if any(layer.shape != first.shape or layer.dtype != first.dtype for layer in layers):
        return None
    if first.dim() != 4 or first.shape[0] // num_blocks * first.shape[2] != spec.block_size:
        return None  # Its rows are not tokens.
    contexts = vllm_config.compilation_config.static_forward_context
    is_plain = first.dtype.is_floating_point and first.element_size() > 1
    token = TokenShape(
        spec.num_kv_heads, spec.head_size, spec.head_size_v, first.dtype if is_plain else vllm_config.model_config.dtype
    )
    common: PageMap | None = None
    for name, layer in zip(layer_names, layers, strict=True):
        write = _cache_write(contexts[name], spec, layer)
        found = find_page_map(layer, write, num_blocks, token) if write is not None else None
        if found is None or common not in (None, found):
            return None
        common = found
    return common


def _cache_write(layer: Any, spec: AttentionSpec, cache: torch.Tensor) -> CacheWrite | None:
    """How the layer's backend writes tokens to a cache; None when it has no such method."""
    if not hasattr(layer.impl, "do_kv_cache_update"):
        return None
    update = _detached(layer.impl, cache).do_kv_cache_update

    def write(keys: torch.Tensor, values: torch.Tensor, scratch: torch.Tensor, slots: torch.Tensor) -> None:
        update(layer, keys, values, scratch, slots)

    def write_latents(keys: torch.Tensor, _: torch.Tensor, scratch: torch.Tensor, slots: torch.Tensor) -> None:
        latents, rotary = keys[:, 0, : layer.kv_lora_rank], keys[:, :, layer.kv_lora_rank :]
        update(latents, rotary, scratch.squeeze(1), slots, layer.kv_cache_dtype, layer._k_scale)

    return write_latents if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) else write


def _detached(impl: Any, cache: torch.Tensor) -> Any:
    """A copy of a backend for writes to scratch memory.

    A backend may keep views of its cache (Triton: of the scales). The copy starts without them, so it does not write to
    the real cache. The engine keeps nothing of the scratch memory either.
    """
    own = copy.copy(impl)
    memory = cache.untyped_storage().data_ptr()
    for name, value in list(vars(own).items()):
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == memory:
            setattr(own, name, None)
    return own
