# SPDX-License-Identifier: Apache-2.0
"""From placements to copies: which bytes of the KV cache are which bytes of an object.

The same copies serve stores and, reversed, loads. They serve any device, because they are addresses. What a page or a
span takes is worked out once, for block 0, and moved to the blocks that are asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from vllm_overlay.transfer.base import Placement, Span
from vllm_overlay.transfer.copy_table import CopyTable, Numbers
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.host_units import HostUnits
from vllm_overlay.transfer.page_map import span_pieces


@dataclass(frozen=True, slots=True, eq=False)
class _Pattern:
    """The copies of a page or of a span in block 0: from addresses to offsets in the object.

    ``block_steps`` are the bytes from block to block, for each copy. ``num_bytes`` is what it takes of the object.
    """

    table: CopyTable
    block_steps: Numbers
    num_bytes: int


def _placed(places: Sequence[tuple[_Pattern, int, int]]) -> CopyTable:
    """The copies of each (pattern, block, offset), all together: many small tables would cost more than the copies."""
    if not places:
        return CopyTable.of(())
    patterns, blocks, offsets = zip(*places, strict=True)
    counts = [len(pattern.table) for pattern in patterns]
    steps = np.concatenate([pattern.block_steps for pattern in patterns])
    table = CopyTable.joined([pattern.table for pattern in patterns])
    return table.moved(np.repeat(blocks, counts) * steps, np.repeat(offsets, counts))


class Descriptors:
    """Made by a transfer for the groups it serves. Not thread-safe."""

    def __init__(self, groups: Mapping[int, GroupTensors]) -> None:
        self._groups = groups
        # A tensor is slow to tell them.
        self._sizes = {group_id: (group.num_blocks, group.block_size) for group_id, group in groups.items()}
        self._pages: dict[int, _Pattern] = {}
        self._spans: dict[tuple[int, int, int], _Pattern] = {}

    def to_units(self, placements: Sequence[Placement], units: HostUnits) -> CopyTable:
        """From the KV cache to the offsets that the objects have in ``units``.

        Raises:
            IndexError: A placement names blocks or tokens that are not there.
            ValueError: A placement does not take as many bytes as its buffer has.
        """
        places = []
        for placement, start, end in zip(placements, units.starts, units.ends, strict=True):
            for pattern, block_id in self._patterns(placement):
                places.append((pattern, block_id, start))
                start += pattern.num_bytes
            if start != end:
                relation = "longer" if start > end else "shorter"
                raise ValueError(f"the object's placement is {relation} than its buffer")
        return _placed(places)

    def of_spans(self, spans: Sequence[Span]) -> CopyTable:
        """Where these spans lie, as sources."""
        return _placed([(self._span(span), span.block_id, 0) for span in spans])

    def _patterns(self, placement: Placement) -> Iterator[tuple[_Pattern, int]]:
        for group_id, block_id in placement.pages:
            yield self._page(group_id, block_id), block_id
        for span in placement.spans:
            yield self._span(span), span.block_id

    def _page(self, group_id: int, block_id: int) -> _Pattern:
        num_blocks, _ = self._sizes[group_id]
        if not 0 <= block_id < num_blocks:
            raise IndexError(f"page {block_id} of group {group_id} is not in {num_blocks} blocks")
        if (pattern := self._pages.get(group_id)) is None:
            # Layer by layer, each page in nominal order.
            layers = self._groups[group_id].layers
            pattern = self._pages[group_id] = _pattern((layer[0], layer) for layer in layers)
        return pattern

    def _span(self, span: Span) -> _Pattern:
        group = self._groups[span.group_id]
        if group.page_map is None:
            raise IndexError(f"{span} cuts a page that is moved whole")
        key = (span.group_id, span.offset, span.num_tokens)
        pattern = self._spans.get(key)
        num_blocks, block_size = self._sizes[span.group_id]
        if not (0 <= span.block_id < num_blocks and 0 <= span.offset < span.offset + span.num_tokens <= block_size):
            raise IndexError(f"{span} is not in {num_blocks} blocks of {block_size} tokens")
        if pattern is None:
            # Layer by layer, in the canonical order of the group's page map.
            first = span._replace(block_id=0)
            parts = [part for layer in group.layers for part in group.page_map.parts(layer)]
            pattern = self._spans[key] = _pattern(
                (piece, part) for part in parts for _, piece in span_pieces(part, first)
            )
        return pattern


def _pattern(pieces: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> _Pattern:
    """From pieces of block 0 in the order of the object, each with the tensor of all blocks that it is from."""
    tables, block_steps, offset = [], [], 0
    for piece, blocks in pieces:
        rows = _rows_of(tuple(piece.shape), piece.stride(), piece.element_size())
        table = rows.moved(piece.data_ptr(), offset)
        tables.append(table)
        block_steps.append(np.full(len(table), blocks.stride(0) * blocks.element_size(), dtype=np.int64))
        offset += piece.numel() * piece.element_size()
    table, steps = CopyTable.joined(tables), np.concatenate(block_steps)
    if (steps == steps[0]).all():
        table = table.merged()
        steps = np.full(len(table), steps[0])
    return _Pattern(table, steps, offset)


@lru_cache(maxsize=1024)
def _rows_of(shape: tuple[int, ...], strides: tuple[int, ...], element_bytes: int) -> CopyTable:
    """From offsets in a strided piece to those of a contiguous one. Layers that are alike share them.

    Rows are as long as both sides are contiguous. Of the dimensions that are left, the largest is that of the rows. The
    others make the copies.
    """
    row_bytes = element_bytes
    outer: list[tuple[int, int, int]] = []
    """(size, step in the piece, step in the contiguous one), from the innermost dimension to the outermost."""
    target_step = row_bytes
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        source_step = stride * element_bytes
        if size > 1:
            if not outer and source_step == row_bytes:
                row_bytes *= size
            elif outer and source_step == outer[-1][0] * outer[-1][1]:
                outer[-1] = (outer[-1][0] * size, *outer[-1][1:])
            else:
                outer.append((size, source_step, target_step))
        target_step *= size
    if not outer:
        return CopyTable.of([(0, 0, 1, row_bytes, row_bytes, row_bytes)])
    rows = outer.pop(max(range(len(outer)), key=lambda place: outer[place][0]))
    copies = np.zeros((2, 1), dtype=np.int64)
    for size, source_step, step in outer:
        steps = np.arange(size, dtype=np.int64) * np.array([[source_step], [step]])
        copies = (steps[:, :, None] + copies[:, None, :]).reshape(2, -1)
    return CopyTable.of([(source, target, rows[0], row_bytes, *rows[1:]) for source, target in copies.T.tolist()])
