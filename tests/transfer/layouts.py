# SPDX-License-Identifier: Apache-2.0
"""KV caches as vLLM registers them on GPUs, in every layout of its own ``create_kv_cache_views``, and writes to them.

The writes stand for those of the GPU backends: index assignments on the nominal view (``flash_attn.py``,
``triton_attn.py``, ``flashinfer.py``), from what vLLM hands a backend for each token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_overlay.connector.kv_cache_groups import group_tensors
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_check import CacheWrite

NUM_BLOCKS, NUM_LAYERS, BLOCK, HEADS, SIZE = 5, 3, 48, 2, 32
LAYERS = [f"layers.{place}" for place in range(NUM_LAYERS)]

Encode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From keys and values, (tokens, heads, size) each, to the content of their cells."""


def side_by_side(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat([keys, values], dim=-1)


def as_fp8(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return side_by_side(keys, values).to(torch.float8_e4m3fn).view(torch.uint8)


def with_scales(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Eight-bit numbers, each half with its own scale behind it."""
    halves = []
    for half in (keys.float(), values.float()):
        scale = half.abs().amax(dim=-1, keepdim=True) / 127
        halves += [(half / scale).round().to(torch.int8).view(torch.uint8), scale.view(torch.uint8)]
    return torch.cat(halves, dim=-1)


@dataclass(frozen=True)
class Kind:
    """What one kind of attention keeps for a token."""

    name: str
    spec: AttentionSpec
    encode: Encode

    @property
    def cell_bytes(self) -> int:
        return self.spec.state_content_size_bytes


def _full(**changes: Any) -> FullAttentionSpec:
    given: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": torch.bfloat16}
    return FullAttentionSpec(**given | changes)


_PAGE = _full().page_size_bytes
KINDS = [
    Kind("bf16", _full(), side_by_side),
    Kind("narrower values", _full(head_size_v=SIZE // 2), side_by_side),
    Kind("fp8", _full(dtype=torch.uint8), as_fp8),
    Kind("scales of each token", _full(dtype=torch.uint8, state_content_bytes=2 * SIZE + 8), with_scales),
    Kind(
        "latents",
        MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=SIZE + 8, dtype=torch.bfloat16),
        lambda keys, _: keys,
    ),
    Kind("padded pages", _full(page_size_padded=_PAGE + 128), side_by_side),
]


@dataclass(frozen=True)
class Layout:
    """An order in memory, and the tokens of a kernel block (None: the backend works on whole blocks)."""

    order: KVCacheLayout
    kernel_block: int | None = None

    def __str__(self) -> str:
        return self.order.name + (f"/{self.kernel_block}" if self.kernel_block else "")

    def is_made_for(self, kind: Kind) -> bool:
        """Whether vLLM makes this layout for a kind."""
        if kind.spec.page_size_padded is None:
            return True
        return self.kernel_block is None and self.order.is_block_compact


LAYOUTS = [Layout(order) for order in KVCacheLayout]
LAYOUTS += [Layout(order, size) for order in (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC) for size in (1, 16)]


each_case = pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, id=f"{kind.name}-{layout}")
        for kind in KINDS
        for layout in LAYOUTS
        if layout.is_made_for(kind)
    ],
)


def views(kind: Kind, layout: Layout, num_blocks: int = NUM_BLOCKS) -> list[torch.Tensor]:
    """The layers' tensors as vLLM registers them, over one buffer."""
    layer_stride, block_stride, *_ = compute_layout_strides(kind.spec, num_blocks, NUM_LAYERS, layout.order)
    size = NUM_LAYERS * num_blocks * kind.spec.page_size_bytes
    place = KVCacheTensor(size=size, layers=LAYERS, layer_stride=layer_stride, block_stride=block_stride)
    raw = torch.randint(-128, 128, (size,), dtype=torch.int8)
    return create_kv_cache_views(raw, kind.spec, num_blocks, layout.order, place, kernel_block_size=layout.kernel_block)


def write_to_cells(encode: Encode) -> CacheWrite:
    """A backend's cache write: each token's content to its slot, in the kernel blocks that the backend sees."""

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        kernel_block = cache.shape[2]
        cache.transpose(1, 2)[slots // kernel_block, slots % kernel_block] = encode(keys, values)

    return write


class Backend:
    """Stands for an attention implementation: only its cache write is called."""

    def __init__(self, write: CacheWrite) -> None:
        self.write = write

    def do_kv_cache_update(self, layer: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
        self.write(keys, values, cache, slots)


class LatentBackend(Backend):
    """The same for multi-head latent attention, which has a signature of its own."""

    def do_kv_cache_update(  # type: ignore[override]
        self, latents: Any, rotary: Any, cache: Any, slots: Any, kv_cache_dtype: str, scale: Any
    ) -> None:
        assert kv_cache_dtype == "auto" and scale == 1.0
        self.write(torch.cat([latents, rotary.squeeze(1)], dim=-1)[:, None], latents, cache.unsqueeze(1), slots)


def layer(kind: Kind, write: CacheWrite | None = None) -> Any:
    """Stands for an attention layer of the model."""
    write = write or write_to_cells(kind.encode)
    is_latent = isinstance(kind.spec, MLAAttentionSpec)
    return SimpleNamespace(
        impl=(LatentBackend if is_latent else Backend)(write),
        kv_lora_rank=SIZE,
        kv_cache_dtype="auto",
        _k_scale=1.0,
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "STANDS_FOR_A_GPU_BACKEND"),
    )


def vllm_config(layers: dict[str, Any]) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        cache_config=SimpleNamespace(kv_cache_layout=None),
    )


def kv_cache_config(kind: Kind, num_blocks: int = NUM_BLOCKS) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(LAYERS, kind.spec)]
    )


def registered(
    kind: Kind, layout: Layout, caches: list[torch.Tensor] | None = None, write: CacheWrite | None = None
) -> GroupTensors:
    """What the worker makes of a group's layers."""
    caches = caches or views(kind, layout)
    config = vllm_config(dict.fromkeys(LAYERS, layer(kind, write)))
    return group_tensors(config, kv_cache_config(kind), dict(zip(LAYERS, caches, strict=True)), 1)[0]


def random_tokens(kind: Kind, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.randn((count, kind.spec.num_kv_heads, size), generator=generator).to(torch.bfloat16)
        for size in (kind.spec.head_size, kind.spec.head_size_v)
    )
    return keys, values
