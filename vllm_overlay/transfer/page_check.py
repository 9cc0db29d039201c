# SPDX-License-Identifier: Apache-2.0
"""A page map is believed only after this check, through the backend's own cache write.

``find_page_map`` writes known tokens to a few scratch blocks that have the registered tensor's strides. It does so four
times, and takes the map that explains every byte of the scratch each time. A page that no map explains is moved whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_overlay.transfer.page_map import CellMap, KeyValueMap, PageMap, has_packed_heads, known_page_maps

CacheWrite = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(keys [tokens, heads, key size], values [tokens, heads, value size], cache as registered, slots [tokens])."""

_NUM_BLOCKS = 4
"""Scratch blocks: the known tokens go to the two in the middle."""
_WRITTEN = slice(1, 3)
_BACKGROUND = 0xA5


@dataclass(frozen=True, slots=True)
class TokenShape:
    """What a backend's cache write takes for one token. ``num_heads`` is also that of the registered tensor."""

    num_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype


def find_page_map(cache: torch.Tensor, write: CacheWrite, num_blocks: int, token: TokenShape) -> PageMap | None:
    """The map that explains a layer's pages, or None. Called by the worker at start.

    Args:
        cache: A layer as registered, (blocks or kernel blocks, heads, tokens, content). Only its shape, strides and
            dtype are looked at.
        write: The backend's cache write.
        num_blocks: vLLM's blocks in ``cache``; it may have a multiple of kernel blocks.
        token: The tokens that ``write`` takes.
    """
    if cache.dim() != 4 or cache.shape[1] != token.num_heads or cache.shape[0] % num_blocks:
        return None
    maps = _possible_maps(cache, num_blocks, token)
    if not maps:
        return None
    check = _Check(cache, write, num_blocks, token)
    return next((page_map for page_map in maps if check.agrees(page_map)), None)


def _possible_maps(cache: torch.Tensor, num_blocks: int, token: TokenShape) -> list[PageMap]:
    """Maps that the layer's form allows."""
    maps: list[PageMap] = []
    block_size, width = cache.shape[2:]
    has_halves = token.key_size == token.value_size and 2 * token.key_size == width and token.dtype == cache.dtype
    if has_halves and cache.shape[0] == num_blocks and has_packed_heads(cache):
        maps += known_page_maps(block_size, token.key_size)
    if cache.stride(3) == 1:
        maps.append(CellMap())
    return maps


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Known tokens, different from each other in every head."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def random(cls, count: int, token: TokenShape, device: torch.device, seed: int) -> "_Tokens":
        generator = torch.Generator().manual_seed(seed)
        keys, values = (
            torch.randn((count, token.num_heads, size), generator=generator).to(device, token.dtype)
            for size in (token.key_size, token.value_size)
        )
        return cls(keys, values)

    def with_one_head_of(self, other: "_Tokens") -> "_Tokens":
        """The same tokens, with one head of each changed."""
        heads = self.keys.shape[1]
        place = torch.arange(len(self.keys), device=self.keys.device)
        keys, values = self.keys.clone(), self.values.clone()
        keys[place, place % heads] = other.keys[place, place % heads]
        values[place, place % heads] = other.values[place, place % heads]
        return _Tokens(keys, values)


@dataclass(frozen=True, slots=True)
class _Round:
    """Tokens and the places they are written to, counted from the first token of the written blocks."""

    tokens: _Tokens
    chosen: torch.Tensor
    """Which tokens are written."""
    places: torch.Tensor
    """Where, one for each that is chosen."""


class _Rounds(NamedTuple):
    """Four rounds of writes. Together they show where every token of a block goes, if a write puts each slot's bytes at
    one place.

    ``in_order`` and ``moved`` hold the same tokens, one place apart, and leave out one place each, in different blocks.
    Cells that move along with their tokens can then only lie where their slots say. ``other`` has other tokens in half
    of the places. ``one_head`` is ``in_order`` with one head of each token changed, which shows that heads are not
    exchanged.
    """

    in_order: _Round
    moved: _Round
    other: _Round
    one_head: _Round

    @classmethod
    def of(cls, block_size: int, token: TokenShape, device: torch.device) -> "_Rounds":
        count = 2 * block_size
        first = _Tokens.random(count, token, device, seed=0)
        second = _Tokens.random(count, token, device, seed=1)
        everything = torch.arange(count)
        in_first = everything[everything != block_size // 2]
        moved = everything[(everything + 1) % count != block_size + block_size // 2]
        half = torch.randperm(count, generator=torch.Generator().manual_seed(2))[:block_size]
        return cls(
            _Round(first, in_first, in_first),
            _Round(first, moved, (moved + 1) % count),
            _Round(second, half, half),
            _Round(first.with_one_head_of(second), in_first, in_first),
        )


class _Check:
    """Rounds of writes to one layer's scratch, and what a map says of them."""

    def __init__(self, cache: torch.Tensor, write: CacheWrite, num_blocks: int, token: TokenShape) -> None:
        kernel_blocks = cache.shape[0] // num_blocks
        self._write = write
        self._block_size = kernel_blocks * cache.shape[2]
        self._memory, self._cache = _scratch(cache, kernel_blocks)
        self._layer = self._cache.unflatten(0, (_NUM_BLOCKS, -1)) if kernel_blocks > 1 else self._cache
        self._rounds = _Rounds.of(self._block_size, token, cache.device)
        self._write_round(self._rounds.in_order)  # A backend may set up what it keeps beside, at its first write.

    def agrees(self, page_map: PageMap) -> bool:
        """Whether the map explains every byte after every round."""
        self._memory.fill_(_BACKGROUND)
        if isinstance(page_map, KeyValueMap):
            return all(self._reads_back(page_map, item) for item in self._rounds)
        return self._has_cells(page_map)

    def _write_round(self, item: _Round) -> None:
        device = self._cache.device
        chosen, slots = item.chosen.to(device), (item.places + self._block_size).to(device)
        self._write(item.tokens.keys[chosen], item.tokens.values[chosen], self._cache, slots)

    def _read_round(self, page_map: PageMap, item: _Round) -> tuple[torch.Tensor, ...] | None:
        """What the map reads in the written blocks, each part (tokens, heads, bytes). The scratch is cleared.

        None when the round changed a byte that the map does not read there.
        """
        self._write_round(item)
        found = []
        for part in page_map.parts(self._layer):
            pages = part[_WRITTEN].clone(memory_format=torch.contiguous_format)
            found.append(pages.view(2 * self._block_size, pages.shape[3], -1).view(torch.uint8))
        for part in page_map.parts(self._layer):
            part[_WRITTEN] = torch.full((part.element_size(),), _BACKGROUND, dtype=torch.uint8).view(part.dtype)[0]
        return tuple(found) if bool((self._memory == _BACKGROUND).all()) else None

    def _reads_back(self, page_map: KeyValueMap, item: _Round) -> bool:
        found = self._read_round(page_map, item)
        if found is None:
            return False
        for part, tokens in zip(found, (item.tokens.keys, item.tokens.values), strict=True):
            expected = torch.full_like(part, _BACKGROUND)
            expected[item.places] = tokens[item.chosen].view(torch.uint8)
            if not torch.equal(part, expected):
                return False
        return True

    def _has_cells(self, page_map: PageMap) -> bool:
        cells = []
        for item in self._rounds:
            found = self._cells_of(page_map, item)
            if found is None:
                return False
            cells.append(found)
        in_order, moved, other, one_head = cells
        return (
            self._are_equal_everywhere(in_order, moved)
            and _are_different(torch.cat([in_order[self._rounds.in_order.chosen], other[self._rounds.other.chosen]]))
            and self._differ_in_one_head(in_order, one_head)
        )

    def _cells_of(self, page_map: PageMap, item: _Round) -> torch.Tensor | None:
        """Each token's cells, (tokens, heads, bytes). None unless just the cells of written tokens changed, and all of
        them.

        Tokens that were not written keep the background.
        """
        found = self._read_round(page_map, item)
        if found is None:
            return None
        changed = (found[0] != _BACKGROUND).any(dim=2)
        expected = torch.zeros_like(changed)
        expected[item.places] = True
        if not torch.equal(changed, expected):
            return None
        by_token = torch.full_like(found[0], _BACKGROUND)
        by_token[item.chosen] = found[0][item.places]
        return by_token

    def _are_equal_everywhere(self, in_order: torch.Tensor, moved: torch.Tensor) -> bool:
        """Whether equal tokens have equal cells at different places."""
        is_in_both = torch.isin(self._rounds.in_order.chosen, self._rounds.moved.chosen)
        both = self._rounds.in_order.chosen[is_in_both]
        return bool(torch.equal(in_order[both], moved[both]))

    def _differ_in_one_head(self, in_order: torch.Tensor, one_head: torch.Tensor) -> bool:
        """Whether a change of one head changes that head's cell and no other."""
        chosen = self._rounds.in_order.chosen
        changed = (in_order != one_head).any(dim=2)
        expected = torch.zeros_like(changed)
        expected[chosen, chosen % expected.shape[1]] = True
        return bool(torch.equal(changed, expected))


def _scratch(cache: torch.Tensor, kernel_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes for ``_NUM_BLOCKS`` blocks, and a view of them with the strides of ``cache``.

    Where the heads lie outside of the blocks, the way from head to head shrinks with the number of blocks.
    """
    rows = _NUM_BLOCKS * kernel_blocks
    strides = list(cache.stride())
    if strides[1] >= cache.shape[0] * strides[0]:
        strides[1] = strides[1] // cache.shape[0] * rows
    shape = (rows, *cache.shape[1:])
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    elements = torch.empty(extent, dtype=cache.dtype, device=cache.device)
    return elements.view(torch.uint8), elements.as_strided(shape, strides)


def _are_different(cells: torch.Tensor) -> bool:
    """Whether no two of all tokens' and heads' cells are equal."""
    rows = cells.flatten(0, 1).cpu().numpy()
    return len({row.tobytes() for row in rows}) == len(rows)
