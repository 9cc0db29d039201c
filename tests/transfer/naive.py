# SPDX-License-Identifier: Apache-2.0
"""A transfer that copies one token's head at a time, by strides or by ``Packing``'s formula; and odd KV caches."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from vllm_overlay.tiers.memory import HostBuffer, HostPool
from vllm_overlay.transfer.base import Placement, Span
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_map import CellMap, KeyValueMap, Packing, known_page_maps

NUM_BLOCKS = 4


@dataclass(frozen=True)
class Case:
    """A KV cache of one attention group (0) and one recurrent group (1), and how its tokens are cut."""

    groups: dict[int, GroupTensors] = field(repr=False)
    unit: int
    """Tokens are cut at its multiples."""
    block_size: int

    @property
    def attention(self) -> GroupTensors:
        return self.groups[0]


def cases(layout: str | None = None) -> st.SearchStrategy[Case]:
    """Caches of this layout, a known one's name or "cells"; of any layout when None."""
    if layout is None:
        return cell_cases() | key_value_cases()
    return cell_cases() if layout == "cells" else key_value_cases(layout)


@st.composite
def cell_cases(draw: st.DrawFn) -> Case:
    """Cells of any bytes, in memory of any order, with or without kernel blocks."""
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.int8]))
    kernel_block, kernel_blocks = draw(st.sampled_from([1, 3, 16])), draw(st.sampled_from([1, 1, 2, 3]))
    block_size = kernel_block * kernel_blocks
    unit = draw(st.sampled_from([n for n in range(1, block_size + 1) if block_size % n == 0]))
    width = draw(st.sampled_from([1, 32, 64, 72, 192]))
    shape = (draw(st.integers(1, 3)), kernel_block, width)
    shape = shape if kernel_blocks == 1 else (kernel_blocks, *shape)
    layers = []
    for _ in range(draw(st.integers(1, 3))):
        if not layers or draw(st.booleans()):
            order = draw(st.permutations(range(len(shape))))
            padding = draw(st.sampled_from([0, 1, 64]))
        layers.append(strided((NUM_BLOCKS, *shape), order, dtype, padding))
    states = tuple(padded((3,), torch.float32, 1) for _ in range(2))
    return Case({0: GroupTensors(tuple(layers), CellMap()), 1: GroupTensors(states)}, unit, block_size)


def strided(shape: tuple[int, ...], order: list[int], dtype: torch.dtype, padding: int) -> torch.Tensor:
    """A cache with these dimensions but the last from the innermost to the outermost; ``padding`` after each step of
    the second, so that not even rows follow each other."""
    strides, step = [0] * (len(shape) - 1) + [1], shape[-1]
    for place, dim in enumerate(order):
        strides[dim] = step
        step = step * shape[dim] + (padding if place == 0 else 0)
    return torch.empty(step, dtype=dtype).as_strided(shape, strides)


@st.composite
def key_value_cases(draw: st.DrawFn, layout: str | None = None) -> Case:
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    unit = draw(st.sampled_from([2, 8, 16, 24, 32, 48]))
    head_size = draw(st.sampled_from([16, 32, 64, 80]))
    block_size = unit * draw(st.sampled_from([1, 2, 4, 6]))
    maps = [page_map for page_map in known_page_maps(block_size, head_size) if unit % page_map.token_unit == 0]
    page_map = draw(st.sampled_from([found for found in maps if layout in (None, found.name)] or maps))
    num_heads = draw(st.integers(1, 3))
    paddings = draw(st.lists(st.sampled_from([0, 1, 64]), min_size=1, max_size=3))
    if draw(st.booleans()):
        paddings = [paddings[0]] * len(paddings)
    layers = tuple(padded((num_heads, block_size, 2 * head_size), dtype, padding) for padding in paddings)
    states = tuple(padded((draw(st.sampled_from([3, 64, 128])),), torch.float32, paddings[0]) for _ in range(2))
    return Case({0: GroupTensors(layers, page_map), 1: GroupTensors(states)}, unit, block_size)


def padded(page_shape: tuple[int, ...], dtype: torch.dtype, padding: int) -> torch.Tensor:
    """A cache of ``NUM_BLOCKS`` contiguous pages with ``padding`` elements after each."""
    page = int(np.prod(page_shape)) + padding
    memory = torch.empty(NUM_BLOCKS * page, dtype=dtype)
    strides = [int(np.prod(page_shape[place + 1 :])) for place in range(len(page_shape))]
    return memory.as_strided((NUM_BLOCKS, *page_shape), (page, *strides))


def memory_of(layer: torch.Tensor) -> np.ndarray:
    """All bytes under a layer, padding included."""
    whole = layer.as_strided((layer.untyped_storage().nbytes() // layer.element_size(),), (1,), 0)
    return whole.view(torch.uint8).numpy()


def randomize(groups: dict[int, GroupTensors], seed: int) -> None:
    """Any bits, those of NaNs included."""
    rng = np.random.default_rng(seed)
    for group in groups.values():
        for layer in group.layers:
            memory_of(layer)[:] = rng.integers(0, 256, memory_of(layer).size, dtype=np.uint8)


def snapshot_of(groups: dict[int, GroupTensors]) -> list[np.ndarray]:
    return [memory_of(layer).copy() for group in groups.values() for layer in group.layers]


def random_pool(num_units: int, unit_bytes: int, seed: int) -> HostPool:
    pool = HostPool(num_units, unit_bytes)
    pool.array[:] = np.random.default_rng(seed).integers(0, 256, pool.array.shape, dtype=np.uint8)
    return pool


def num_bytes_of(groups: dict[int, GroupTensors], placement: Placement) -> int:
    pages = sum(groups[group_id].page_bytes for group_id, _ in placement.pages)
    return pages + sum(span.num_tokens * groups[span.group_id].token_bytes for span in placement.spans)


def span_pieces(group: GroupTensors, span: Span) -> Iterator[np.ndarray]:
    """Indices, into a layer's memory, of the bytes of one token's head after the other in the canonical order."""
    for layer in group.layers:
        size = layer.element_size()
        pieces = cells(layer, span) if isinstance(group.page_map, CellMap) else halves(group, layer, span)
        for elements in pieces:
            yield (np.array(elements)[:, None] * size + np.arange(size)).ravel()


def cells(layer: torch.Tensor, span: Span) -> Iterator[list[int]]:
    """Indices of each cell's elements, by the layer's strides."""
    *_, num_heads, kernel_block, width = layer.shape
    for token in range(span.offset, span.offset + span.num_tokens):
        for head in range(num_heads):
            inside = (token // kernel_block, head, token % kernel_block) if layer.dim() == 5 else (head, token)
            steps = zip((span.block_id, *inside), layer.stride()[:-1], strict=True)
            start = layer.storage_offset() + sum(index * stride for index, stride in steps)
            yield [start + place for place in range(width)]


def halves(group: GroupTensors, layer: torch.Tensor, span: Span) -> Iterator[list[int]]:
    """Indices of each key's elements, then of each value's, by the map's formula."""
    assert isinstance(group.page_map, KeyValueMap)
    _, num_heads, _, width = layer.shape
    for packing in (group.page_map.keys, group.page_map.values):
        for token in range(span.offset, span.offset + span.num_tokens):
            for head in range(num_heads):
                start = layer.storage_offset() + span.block_id * layer.stride(0) + head * layer.stride(1)
                yield [start + place_of(packing, token, dim) for dim in range(width // 2)]


def page_indices(layer: torch.Tensor, block_id: int) -> np.ndarray:
    """Indices of a page's bytes in nominal order, whatever its strides."""
    start = layer.storage_offset() + block_id * layer.stride(0)
    places = np.indices(layer.shape[1:]).reshape(layer.dim() - 1, -1).T
    elements = start + places @ np.array(layer.stride()[1:])
    return (elements[:, None] * layer.element_size() + np.arange(layer.element_size())).ravel()


def place_of(packing: Packing, token: int, dim: int) -> int:
    return (
        packing.offset
        + token // packing.token_inner * packing.token_stride
        + token % packing.token_inner * packing.inner_token_stride
        + dim // packing.dim_inner * packing.dim_stride
        + dim % packing.dim_inner * packing.inner_dim_stride
    )


def pieces(groups: dict[int, GroupTensors], placement: Placement) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(a layer's memory, indices of bytes in it), in the order of the object's bytes."""
    for group_id, block_id in placement.pages:
        for layer in groups[group_id].layers:
            yield memory_of(layer), page_indices(layer, block_id)
    for span in placement.spans:
        group = groups[span.group_id]
        found = list(span_pieces(group, span))
        per_layer = len(found) // len(group.layers)
        for place, indices in enumerate(found):
            yield memory_of(group.layers[place // per_layer]), indices


def gathered(groups: dict[int, GroupTensors], placement: Placement) -> np.ndarray:
    """The object's bytes."""
    return np.concatenate([memory[indices] for memory, indices in pieces(groups, placement)])


def scatter(groups: dict[int, GroupTensors], placement: Placement, data: np.ndarray) -> None:
    done = 0
    for memory, indices in pieces(groups, placement):
        memory[indices] = data[done : done + indices.size]
        done += indices.size


def bytes_of(buffer: HostBuffer) -> np.ndarray:
    return np.concatenate(buffer.segments())
