# SPDX-License-Identifier: Apache-2.0
"""A token's bytes are the same whatever layout they come from and go to; a write that mixes tokens up is refused."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.transfer import naive
from tests.transfer.copying import copied
from tests.transfer.layouts import (
    BLOCK,
    HEADS,
    KINDS,
    LAYOUTS,
    NUM_BLOCKS,
    SIZE,
    Kind,
    Layout,
    each_case,
    random_tokens,
    registered,
    side_by_side,
    views,
    write_to_cells,
)
from vllm_overlay.tiers.memory import HostBuffer, HostPool
from vllm_overlay.transfer.base import Placement, Span
from vllm_overlay.transfer.cpu import CpuTransfer
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_check import CacheWrite, TokenShape, find_page_map
from vllm_overlay.transfer.page_map import CellMap, known_page_maps

SPANS = [Span(0, 1, 0, BLOCK), Span(0, 3, 5, 30), Span(0, 2, 16, 16), Span(0, 0, BLOCK - 1, 1)]
"""A block, tokens across kernel blocks' borders, a kernel block, one token."""
BF16 = KINDS[0]

each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def buffers_of(group: GroupTensors, placements: list[Placement]) -> list[HostBuffer]:
    """A unit for each placement, all as large as the largest needs."""
    sizes = [naive.num_bytes_of({0: group}, placement) for placement in placements]
    pool = HostPool(len(sizes), max(sizes))
    return [pool.buffer([unit], size) for unit, size in enumerate(sizes)]


def tokens_of(caches: list[torch.Tensor], span: Span) -> Iterator[np.ndarray]:
    """The bytes of a span's tokens in the nominal view that a backend has: layer by layer, (tokens, heads, bytes)."""
    for cache in caches:
        kernel_block = cache.shape[2]
        slots = span.block_id * BLOCK + span.offset + torch.arange(span.num_tokens)
        assert cache.shape[0] * kernel_block == NUM_BLOCKS * BLOCK
        rows = cache.transpose(1, 2)[slots // kernel_block, slots % kernel_block]
        yield rows.contiguous().view(torch.uint8).numpy()


@each_case
def test_tokens_that_a_backend_wrote_are_gathered_cell_by_cell(kind: Kind, layout: Layout) -> None:
    """The host has (layer, token, head, cell): what the backend wrote for these tokens, and nothing else."""
    caches = views(kind, layout)
    group = registered(kind, layout, caches)
    write, expected = write_to_cells(kind.encode), []
    for seed, cache in enumerate(caches):
        keys, values = random_tokens(kind, NUM_BLOCKS * BLOCK, seed)
        write(keys, values, cache, torch.arange(NUM_BLOCKS * BLOCK))
        expected.append(kind.encode(keys, values).view(torch.uint8).numpy())
    placements = [Placement(spans=(span,)) for span in SPANS]
    buffers = buffers_of(group, placements)
    copied(CpuTransfer({0: group}), "gather", placements, buffers)
    for span, placement, buffer in zip(SPANS, placements, buffers, strict=True):
        first = span.block_id * BLOCK + span.offset
        wanted = np.concatenate([cells[first : first + span.num_tokens].ravel() for cells in expected])
        assert (naive.bytes_of(buffer) == wanted).all()
        assert (naive.gathered({0: group}, placement) == wanted).all()


@each_case
def test_tokens_move_from_any_layout_to_any_other(kind: Kind, layout: Layout) -> None:
    source_caches = views(kind, layout)
    group = registered(kind, layout, source_caches)
    placements = [Placement(spans=(span,)) for span in SPANS]
    buffers = buffers_of(group, placements)
    copied(CpuTransfer({0: group}), "gather", placements, buffers)
    for target in [target for target in LAYOUTS if target.is_made_for(kind)]:
        caches = views(kind, target)
        own = registered(kind, target, caches)
        expected = after_naive_scatter(own, placements, buffers)
        copied(CpuTransfer({0: own}), "scatter", placements, buffers)
        assert (naive.memory_of(caches[0]) == expected).all()
        for span in SPANS:
            pairs = zip(tokens_of(source_caches, span), tokens_of(caches, span), strict=True)
            assert all((a == b).all() for a, b in pairs)


def after_naive_scatter(group: GroupTensors, placements: list[Placement], buffers: list[HostBuffer]) -> np.ndarray:
    """All bytes of the buffer under the layers, as the naive twin would leave it; the layers stay as they are."""
    memory = naive.memory_of(group.layers[0])
    before = memory.copy()
    for placement, buffer in zip(placements, buffers, strict=True):
        naive.scatter({0: group}, placement, naive.bytes_of(buffer))
    after = memory.copy()
    memory[:] = before
    return after


@each_case
def test_whole_pages_are_copied_in_nominal_order(kind: Kind, layout: Layout) -> None:
    """Of groups that no map cuts: pages need not be contiguous, and what lies between them stays as it is."""
    group = registered(kind, layout, write=lambda *_: None)
    assert group.page_map is None
    placement = Placement(pages=((0, 3), (0, 1)))
    (buffer,) = buffers_of(group, [placement])
    transfer = CpuTransfer({0: group})
    copied(transfer, "gather", [placement], [buffer])
    assert (naive.bytes_of(buffer) == naive.gathered({0: group}, placement)).all()
    moved = Placement(pages=((0, 0), (0, 4)))
    expected = after_naive_scatter(group, [moved], [buffer])
    copied(transfer, "scatter", [moved], [buffer])
    assert (naive.memory_of(group.layers[0]) == expected).all()


# Writes that a map of cells would get wrong.


Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Keys, values and slots."""


def other(change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tokens]) -> CacheWrite:
    """Writes other tokens than it is given, or to other slots."""

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        keys, values, slots = change(keys, values, slots)
        write_to_cells(side_by_side)(keys, values, cache[:, : keys.shape[1]], slots)

    return write


def elsewhere(place: Callable[[torch.Tensor], torch.Tensor]) -> CacheWrite:
    return other(lambda keys, values, slots: (keys, values, place(slots)))


def swapped(slots: torch.Tensor, first: int, second: int) -> torch.Tensor:
    return torch.where(slots == first, second, torch.where(slots == second, first, slots))


def value_in_the_next_cell(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    half = keys.shape[-1]
    rows, kernel_block = cache.transpose(1, 2), cache.shape[2]
    for tokens, places, content in ((keys, slots, slice(None, half)), (values, slots + 1, slice(half, None))):
        rows[places // kernel_block, places % kernel_block, :, content] = tokens


def columns(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """The bytes of a block's head are [content][token]."""
    num_tokens, width = cache.shape[2:]
    pages = cache.reshape(*cache.shape[:2], width, num_tokens)
    pages[slots // num_tokens, :, :, slots % num_tokens] = side_by_side(keys, values)
    cache.copy_(pages.view(cache.shape))


def also_elsewhere(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    write_to_cells(side_by_side)(keys, values, cache, slots)
    cache[0, 0, 0, 0] += 1


def clears_the_rest(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """The tokens that lie beside the written ones are lost."""
    around = (torch.unique(slots // BLOCK)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    nothing = torch.zeros(len(around), *keys.shape[1:], dtype=keys.dtype)
    write_to_cells(side_by_side)(nothing, nothing, cache, around)
    write_to_cells(side_by_side)(keys, values, cache, slots)


WRONG_WRITES: dict[str, CacheWrite] = {
    "clears the rest": clears_the_rest,
    "one token on around both of the written blocks": elsewhere(
        lambda slots: BLOCK + (slots - BLOCK + 1) % (2 * BLOCK)
    ),
    "two tokens of one block": elsewhere(lambda slots: swapped(slots, 2 * BLOCK + 40, 2 * BLOCK + 41)),
    "two heads": other(lambda keys, values, slots: (keys.flip(1), values.flip(1), slots)),
    "values of the other head": other(lambda keys, values, slots: (keys, values.flip(1), slots)),
    "value in the next cell": value_in_the_next_cell,
    "one token on": elsewhere(lambda slots: slots + 1),
    "one token on in the block": elsewhere(lambda slots: slots // BLOCK * BLOCK + (slots + 1) % BLOCK),
    "one block on": elsewhere(lambda slots: slots + BLOCK),
    "the two written blocks exchanged": elsewhere(lambda slots: 3 * BLOCK - slots // BLOCK * BLOCK + slots % BLOCK),
    "also elsewhere": also_elsewhere,
    "by place, so that it means nothing elsewhere": other(
        lambda keys, values, slots: (keys, values + slots[:, None, None], slots)
    ),
    "always the same": other(lambda keys, values, slots: (torch.ones_like(keys), torch.ones_like(values), slots)),
    "the first head alone": other(lambda keys, values, slots: (keys[:, :1], values[:, :1], slots)),
}


@pytest.mark.parametrize("write", WRONG_WRITES.values(), ids=WRONG_WRITES)
@each_layout
def test_a_write_that_cells_do_not_explain_is_refused(layout: Layout, write: CacheWrite) -> None:
    assert registered(BF16, layout, write=write).page_map is None


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.kernel_block is None], ids=str)
def test_columns_are_not_cells(layout: Layout) -> None:
    assert not isinstance(registered(BF16, layout, write=columns).page_map, CellMap)


def test_every_swap_of_two_places_is_refused() -> None:
    """All of one block's and some across blocks: none slips through the pattern of the rounds."""
    layout = LAYOUTS[1]
    caches = views(BF16, layout)
    for first in range(BLOCK):
        for second in range(first + 1, 2 * BLOCK, 1 if first in (0, BLOCK // 2, BLOCK - 1) else 7):
            write = elsewhere(partial(swapped, first=BLOCK + first, second=BLOCK + second))
            assert registered(BF16, layout, caches, write).page_map is None


def test_a_layer_with_another_map_makes_the_group_whole() -> None:
    """The last layer has strides of its own: fine as cells, but not when its backend exchanges the heads."""
    caches = views(BF16, LAYOUTS[1])
    caches[-1] = torch.zeros(NUM_BLOCKS, BLOCK, 3 * HEADS, 2 * SIZE, dtype=torch.bfloat16)[:, :, :HEADS].transpose(1, 2)
    own_strides = caches[-1].stride()

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        keys = keys.flip(1) if cache.stride() == own_strides else keys
        write_to_cells(side_by_side)(keys, values, cache, slots)

    assert isinstance(registered(BF16, LAYOUTS[1], caches).page_map, CellMap)
    assert registered(BF16, LAYOUTS[1], caches, write).page_map is None


def test_layers_with_different_maps_are_moved_whole() -> None:
    """Each map is right for its layer, but there is no order that is common to them."""
    shape = (NUM_BLOCKS, HEADS, BLOCK, 2 * SIZE)
    page = HEADS * BLOCK * 2 * SIZE
    caches = [
        torch.zeros(NUM_BLOCKS * (page + padding), dtype=torch.bfloat16).as_strided(
            shape, (page + padding, BLOCK * 2 * SIZE, 2 * SIZE, 1)
        )
        for padding in (0, 0, 64)
    ]
    column_keys = known_page_maps(BLOCK, SIZE)[0]

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        if cache.stride(0) == page:
            write_to_cells(side_by_side)(keys, values, cache, slots)
        else:
            for part, tokens in zip(column_keys.parts(cache), (keys, values), strict=True):
                part[slots // BLOCK, slots % BLOCK, 0] = tokens[..., None]

    token = TokenShape(HEADS, SIZE, SIZE, torch.bfloat16)
    maps = [find_page_map(cache, write, NUM_BLOCKS, token) for cache in caches]
    assert maps == [CellMap(), CellMap(), column_keys]
    assert registered(BF16, LAYOUTS[0], caches, write).page_map is None


def test_cells_that_do_not_tell_tokens_apart_are_refused() -> None:
    """Each cell says only whether its key was in the first write."""
    seen: list[torch.Tensor] = []

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        seen.append(keys.double() @ torch.linspace(1, 2, SIZE, dtype=torch.float64))
        is_old = torch.isin(seen[-1], seen[0])[:, :, None]
        content = is_old.expand_as(keys).to(keys.dtype)
        write_to_cells(side_by_side)(content + 1, content + 1, cache, slots)

    assert registered(BF16, LAYOUTS[1], write=write).page_map is None


def test_the_scratch_is_small_where_heads_lie_outside_of_blocks() -> None:
    """As far apart as in the real cache, heads would take almost all its memory a second time."""
    layout = Layout(KVCacheLayout.LHBNC)
    sizes = set()

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        sizes.add(cache.untyped_storage().nbytes())
        write_to_cells(side_by_side)(keys, values, cache, slots)

    cache = torch.empty(HEADS, 1000, BLOCK, 2 * SIZE, dtype=torch.bfloat16).transpose(0, 1)
    assert cache.stride() == views(BF16, layout, 1000)[0].stride()
    assert find_page_map(cache, write, 1000, TokenShape(HEADS, SIZE, SIZE, torch.bfloat16)) == CellMap()
    assert sizes == {4 * cache[0].numel() * 2}
