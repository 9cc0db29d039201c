# SPDX-License-Identifier: Apache-2.0
"""Where a token's bytes lie inside an attention page: the maps that a page can be cut by.

Most backends keep each (token, head) in one cell of the registered tensor, and the tensor's strides say where:
``CellMap``. The CPU kernels keep a page's keys apart from its values, column-major over the block or packed in tiles:
``KeyValueMap``. ``page_check.find_page_map`` decides which one a layer obeys.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_overlay.transfer.base import Span


class PageMap(ABC):
    """Where the tokens of a group's pages are. Layers with equal maps have one canonical order."""

    order: ClassVar[str]
    """The canonical order of a span's bytes, from the outermost dimension to the innermost."""

    name: str
    """What logs and fingerprints call it."""

    @property
    @abstractmethod
    def token_unit(self) -> int:
        """Pages can be cut at multiples of this many tokens."""

    @abstractmethod
    def parts(self, layer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a layer's pages, one for each part that the canonical order keeps apart.

        Args:
            layer: (blocks, heads, tokens a block, content), or (blocks, kernel blocks, heads, tokens, content).

        Returns:
            Tensors of the shape (blocks, token groups, tokens a group, heads, content groups, elements a group).
        """


@dataclass(frozen=True, slots=True)
class CellMap(PageMap):
    """Each (token, head) is one cell of opaque bytes. The layer's own strides say where it lies.

    What is in a cell is the backend's business: a key and a value, a latent, fp8 numbers, scales.
    """

    order = "layer, token, head, cell"
    name = "cells"
    token_unit = 1

    def parts(self, layer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One part, of bytes."""
        cells = layer.view(torch.uint8)
        if cells.dim() == 4:
            cells = cells.unsqueeze(1)
        cells = cells.transpose(2, 3)
        _, kernel_blocks, tokens, _, _ = cells.shape
        if 1 in (kernel_blocks, tokens) or cells.stride(1) == tokens * cells.stride(2):
            cells = cells.flatten(1, 2).unsqueeze(2)
        return (cells.unsqueeze(-1),)


@dataclass(frozen=True, slots=True)
class Packing:
    """Place of element (token n, dimension d) in the page of one head, in elements from the page's start:

    ``offset + n // token_inner * token_stride + n % token_inner * inner_token_stride
    + d // dim_inner * dim_stride + d % dim_inner * inner_dim_stride``.
    """

    offset: int
    token_stride: int
    dim_stride: int
    token_inner: int = 1
    inner_token_stride: int = 0
    dim_inner: int = 1
    inner_dim_stride: int = 0

    def view(self, cache: torch.Tensor, head_size: int) -> torch.Tensor:
        """``cache`` as (blocks, token groups, tokens a group, heads, dimension groups, dimensions a group).

        The page of one head must be contiguous (``has_packed_heads``); blocks and heads have the cache's own strides.
        """
        num_blocks, num_heads, block_size, _ = cache.shape
        shape = (
            num_blocks,
            block_size // self.token_inner,
            self.token_inner,
            num_heads,
            head_size // self.dim_inner,
            self.dim_inner,
        )
        strides = (
            cache.stride(0),
            self.token_stride,
            self.inner_token_stride,
            cache.stride(1),
            self.dim_stride,
            self.inner_dim_stride,
        )
        return cache.as_strided(shape, strides, cache.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class KeyValueMap(PageMap):
    """A layout of the CPU kernels: where keys and values lie in the page of one (block, head)."""

    order = "layer, key/value, token, head, dimension"

    name: str
    keys: Packing
    values: Packing

    @property
    def token_unit(self) -> int:
        return max(self.keys.token_inner, self.values.token_inner)

    def parts(self, layer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The keys, then the values."""
        head_size = layer.shape[-1] // 2
        return self.keys.view(layer, head_size), self.values.view(layer, head_size)


def span_pieces(part: torch.Tensor, span: Span) -> Iterator[tuple[int, torch.Tensor]]:
    """A span in one part of a layer's pages (``PageMap.parts``), cut where a token group is not taken whole.

    Each piece comes with the number of tokens before it: (token groups, tokens a group, heads, content groups,
    elements a group).
    """
    unit, token, end = part.shape[2], span.offset, span.offset + span.num_tokens
    while token < end:
        group, inner = divmod(token, unit)
        if inner or end - token < unit:
            stop = min(end, (group + 1) * unit)
            piece = part[span.block_id, group : group + 1, inner : inner + stop - token]
        else:
            stop = end - end % unit
            piece = part[span.block_id, group : stop // unit]
        yield token - span.offset, piece
        token = stop


def has_packed_heads(cache: torch.Tensor) -> bool:
    """Whether the page of one (block, head) is contiguous. A ``KeyValueMap`` relies on that."""
    return bool(cache.dim() == 4 and cache[0, 0].is_contiguous())


def known_page_maps(block_size: int, head_size: int) -> list[KeyValueMap]:
    """The layouts of vLLM 0.32.0's CPU kernels that can be cut by token, for pages of ``block_size`` tokens.

    Sources: csrc/cpu/cpu_attn_vec.hpp (column-major keys) and csrc/cpu/cpu_attn_amx.hpp (tiles of 64-byte rows, 2-byte
    elements).
    """
    half = block_size * head_size
    rows = Packing(half, head_size, 1)
    maps = [
        KeyValueMap("column_keys", Packing(0, 1, block_size), rows),
        KeyValueMap("row_keys", Packing(0, head_size, 1), rows),
    ]
    if head_size % 16 == 0 and block_size % 32 == 0:
        amx_keys = Packing(0, 16 * head_size, 32, token_inner=16, inner_token_stride=2, dim_inner=2, inner_dim_stride=1)
        amx_values = Packing(
            half, 32, 16 * block_size, token_inner=2, inner_token_stride=1, dim_inner=16, inner_dim_stride=2
        )
        maps.append(KeyValueMap("amx_tiles", amx_keys, amx_values))
    return maps
