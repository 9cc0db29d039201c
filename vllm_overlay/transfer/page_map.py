# SPDX-License-Identifier: Apache-2.0
"""Where a token's bytes lie inside an attention page: a map per known layout, believed only after a check.

The registered tensor's shape (blocks, heads, tokens, 2 x head size) does not tell: the CPU kernels keep a page's keys
column-major over the whole block, or packed in tiles. ``find_page_map`` writes known keys and values through the
backend's own cache write and takes the map that reads them back. A page no map explains is moved whole.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

CacheWrite = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(keys [tokens, heads, size], values, cache [blocks, heads, tokens a block, 2 x size], slots [tokens])."""


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
        """``cache`` as (blocks, token groups, tokens a group, heads, dimension groups, dimensions a group)."""
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
class PageMap:
    """A known layout of the page of one (block, head): where its keys and its values are."""

    name: str
    keys: Packing
    values: Packing

    @property
    def token_unit(self) -> int:
        """Pages can be cut at multiples of this many tokens."""
        return max(self.keys.token_inner, self.values.token_inner)


def known_page_maps(block_size: int, head_size: int) -> list[PageMap]:
    """The layouts of vLLM 0.32.0 that we can cut by token, for pages of ``block_size`` tokens.

    Sources: csrc/cpu/cpu_attn_vec.hpp (column-major keys), csrc/cpu/cpu_attn_amx.hpp (tiles of 64-byte rows, 2-byte
    elements), and the nominal order of ``AttentionBackend`` (a token's key, then its value).
    """
    half = block_size * head_size
    rows = Packing(half, head_size, 1)
    maps = [
        PageMap("column_keys", Packing(0, 1, block_size), rows),
        PageMap("row_keys", Packing(0, head_size, 1), rows),
        PageMap("token_major", Packing(0, 2 * head_size, 1), Packing(head_size, 2 * head_size, 1)),
    ]
    if head_size % 16 == 0 and block_size % 32 == 0:
        amx_keys = Packing(
            0,
            16 * head_size,
            32,
            token_inner=16,
            inner_token_stride=2,
            dim_inner=2,
            inner_dim_stride=1,
        )
        amx_values = Packing(
            half,
            32,
            16 * block_size,
            token_inner=2,
            inner_token_stride=1,
            dim_inner=16,
            inner_dim_stride=2,
        )
        maps.append(PageMap("amx_tiles", amx_keys, amx_values))
    return maps


def find_page_map(cache: torch.Tensor, write: CacheWrite) -> PageMap | None:
    """The map that explains ``cache``'s pages, or None. Called by the worker at start, for one layer of each group.

    ``cache`` is only looked at for its shape and dtype; the known tokens go to a scratch cache of three blocks.
    """
    if cache.dim() != 4 or not cache.dtype.is_floating_point or cache.element_size() < 2:
        return None
    _, num_heads, block_size, width = cache.shape
    if width % 2:
        return None
    head_size = width // 2
    scratch = torch.zeros((3, num_heads, block_size, width), dtype=cache.dtype, device=cache.device)
    generator = torch.Generator().manual_seed(0)
    num_tokens = 2 * block_size
    shape = (num_tokens, num_heads, head_size)
    keys = torch.randn(shape, generator=generator).to(cache.device, cache.dtype)
    values = torch.randn(shape, generator=generator).to(cache.device, cache.dtype)
    slots = torch.arange(block_size, block_size + num_tokens, device=cache.device)
    write(keys, values, scratch, slots)
    for page_map in known_page_maps(block_size, head_size):
        found_keys = page_map.keys.view(scratch, head_size)[1:].reshape(shape)
        found_values = page_map.values.view(scratch, head_size)[1:].reshape(shape)
        if torch.equal(found_keys, keys) and torch.equal(found_values, values):
            return page_map
    return None
