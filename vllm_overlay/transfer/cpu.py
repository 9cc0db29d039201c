# SPDX-License-Identifier: Apache-2.0
"""Transfers for KV tensors in host memory (vLLM's CPU platform)."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_overlay.tiers.memory import Bytes, HostBuffer
from vllm_overlay.transfer import cpu_kernels
from vllm_overlay.transfer.base import FinishedCopy, Handle, KVTransfer, Placement, Span, error_of
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.object_stream import ObjectStream
from vllm_overlay.transfer.page_map import PageMap, span_pieces


@dataclass(frozen=True, slots=True)
class _Run:
    """Chunks that follow each other in one block, and the rows of ``array`` that they lie in. ``span`` is the first
    chunk."""

    span: Span
    array: Bytes
    units: list[int]


class CpuTransfer(KVTransfer):
    """Copies on the calling thread. Chunks go in runs, so that whole blocks move in one call."""

    def __init__(self, groups: Mapping[int, GroupTensors]) -> None:
        self._groups = groups
        self._handles = itertools.count(1)
        self._finished: list[FinishedCopy] = []
        self._scratch: Bytes = np.empty(0, dtype=np.uint8)
        self._pages = {group_id: [_WholePages(layer) for layer in group.layers] for group_id, group in groups.items()}
        self._parts = {
            group_id: _parts(group.page_map, group.layers)
            for group_id, group in groups.items()
            if group.page_map is not None
        }
        cpu_kernels.prepare(any(part.has_tiles for parts in self._parts.values() for part in parts))

    def gather(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer]) -> Handle:
        return self._finish(partial(self._copy, placements, buffers, to_host=True))

    def scatter(
        self, placements: Sequence[Placement], buffers: Sequence[HostBuffer], zeros: Sequence[Span] = ()
    ) -> Handle:
        return self._finish(partial(self._copy, placements, buffers, zeros, to_host=False))

    def poll(self) -> list[FinishedCopy]:
        finished, self._finished = self._finished, []
        return finished

    def _finish(self, copy: Callable[[], None]) -> Handle:
        """Copies at once; the handle is finished when it is given out."""
        handle = Handle(next(self._handles))
        self._finished.append(FinishedCopy(handle, error_of(copy)))
        return handle

    def _copy(
        self,
        placements: Sequence[Placement],
        buffers: Sequence[HostBuffer],
        zeros: Sequence[Span] = (),
        *,
        to_host: bool,
    ) -> None:
        for item in _plan(placements, buffers):
            if isinstance(item, _Run):
                for part in self._parts[item.span.group_id]:
                    part.copy(item, range(len(self._groups[item.span.group_id].layers)), to_host=to_host)
            else:
                self._copy_object(*item, to_host=to_host)
        for span in zeros:
            for part in self._parts[span.group_id]:
                part.zero(span)

    def _copy_object(self, placement: Placement, buffer: HostBuffer, *, to_host: bool) -> None:
        stream = ObjectStream(buffer)
        for group_id, block_id in placement.pages:
            for pages in self._pages[group_id]:
                pages.copy(block_id, stream, to_host)
        for span, layers, data, in_place in self._slabs(placement, stream):
            if not in_place and not to_host:
                stream.copy(data.ctypes.data, data.size, to_host)
            for part in self._parts[span.group_id]:
                part.copy(_Run(span, data[None], [0]), layers, to_host=to_host)
            if not in_place and to_host:
                stream.copy(data.ctypes.data, data.size, to_host)
        stream.check_end()

    def _scratch_of(self, num_bytes: int) -> Bytes:
        """For one layer of a span that lies in several pieces; the same warm memory each time."""
        if self._scratch.size < num_bytes:
            self._scratch = np.empty(num_bytes, dtype=np.uint8)
        return self._scratch[:num_bytes]

    def _slabs(self, placement: Placement, stream: ObjectStream) -> Iterator[tuple[Span, range, Bytes, bool]]:
        """The placement's spans, as many layers at once as lie in one piece, with their bytes.

        The bytes are those of the buffer (True). For a layer that lies in several pieces they are others, to copy from
        or to.
        """
        for span in placement.spans:
            group = self._groups[span.group_id]
            num_layers = len(group.layers)
            layer_bytes = span.num_tokens * group.token_bytes // num_layers
            layer = 0
            while layer < num_layers:
                fit = min(num_layers - layer, stream.piece_bytes // layer_bytes)
                data = stream.take(fit * layer_bytes) if fit else self._scratch_of(layer_bytes)
                layers = range(layer, layer + max(fit, 1))
                yield span, layers, data, fit > 0
                layer = layers.stop


def _parts(page_map: PageMap, layers: Sequence[torch.Tensor]) -> tuple["_Part", ...]:
    """What the canonical order of a group keeps apart."""
    by_part = list(zip(*(page_map.parts(layer) for layer in layers), strict=True))
    return tuple(_Part(views, place, len(by_part)) for place, views in enumerate(by_part))


class _Part:
    """The keys, the values or the cells in a group's pages, and copies between them and the canonical order.

    A layer's slab in the host's memory has ``num_parts``. ``place`` is this one's.
    """

    def __init__(self, views: Sequence[torch.Tensor], place: int, num_parts: int) -> None:
        sample = views[0]
        self._views = views
        self._place, self._num_parts = place, num_parts
        _, groups, self._unit, self._num_heads, *content = sample.shape
        self._block_size = groups * self._unit
        self._head_size = content[0] * content[1]
        self._dtype, element_bytes = sample.dtype, sample.element_size()
        self._head_bytes = self._head_size * element_bytes
        self._pages = np.array([view.data_ptr() for view in views], dtype=np.int64)
        steps = [stride * element_bytes for stride in sample.stride()]
        self._block_step, self._group_step, token_step, self._head_step, self._dim_step, inner_step = steps
        alike = all((view.shape, view.stride()) == (sample.shape, sample.stride()) for view in views)
        plain = alike and self._unit == content[1] == 1
        self._has_rows = plain and self._dim_step == element_bytes and cpu_kernels.can_copy_rows(self._head_bytes)
        self._has_columns = plain and self._group_step == element_bytes == 2
        inner = element_bytes, self._unit, content[1], token_step, inner_step
        self._has_key_tiles = alike and inner == (2, 16, 2, 4, 2) and self._dim_step == cpu_kernels.LINE
        self._has_value_tiles = alike and inner == (2, 2, 16, 2, 4) and self._group_step == cpu_kernels.LINE
        self.has_tiles = self._has_key_tiles or self._has_value_tiles

    def zero(self, span: Span) -> None:
        """Clear the span in all layers."""
        for view in self._views:
            for _, tokens in span_pieces(view, span):
                tokens.zero_()

    def copy(self, run: _Run, layers: range, *, to_host: bool) -> None:
        """Copies between these layers' pages and the run's rows, which have these layers alone."""
        span = run.span
        self._check(run, len(layers))
        if self._has_rows:
            cpu_kernels.copy_rows(*self._places(run, layers, self._group_step), to_host)
        elif not cpu_kernels.can_transpose(self._head_size, span.offset, span.num_tokens):
            self._copy_strided(run, layers, to_host)
        elif self._has_columns:
            kernel = cpu_kernels.gather_columns if to_host else cpu_kernels.scatter_columns
            kernel(*self._places(run, layers, self._dim_step))
        elif self._has_key_tiles:
            cpu_kernels.copy_key_tiles(*self._places(run, layers, self._group_step), to_host)
        elif self._has_value_tiles:
            cpu_kernels.copy_value_tiles(*self._places(run, layers, self._dim_step), to_host)
        else:
            self._copy_strided(run, layers, to_host)

    def _check(self, run: _Run, num_layers: int) -> None:
        """Checks the bounds: compiled copies would go on beyond the ends of a page or of the host's memory."""
        num_blocks, block_size = self._views[0].shape[0], self._block_size
        end = run.span.offset + len(run.units) * run.span.num_tokens
        if not (0 <= run.span.block_id < num_blocks and 0 <= run.span.offset < end <= block_size):
            raise IndexError(f"{run.span} and what follows it is not in {num_blocks} blocks of {block_size} tokens")
        num_bytes = num_layers * self._num_parts * run.span.num_tokens * self._num_heads * self._head_bytes
        if not (0 <= min(run.units) <= max(run.units) < run.array.shape[0] and num_bytes <= run.array.shape[1]):
            raise IndexError(f"{num_bytes} bytes in units {run.units} are not in a pool of shape {run.array.shape}")

    def _places(self, run: _Run, layers: range, page_step: int) -> tuple[Any, ...]:
        """What compiled copies take to find both sides. ``page_step`` is the page's that is not from head to head."""
        span, array = run.span, run.array
        slab_bytes = span.num_tokens * self._num_heads * self._head_bytes
        return (
            self._pages[layers.start : layers.stop],
            span.block_id * self._block_step + span.offset // self._unit * self._group_step,
            page_step,
            self._head_step,
            array.ctypes.data + self._place * slab_bytes,
            self._num_parts * slab_bytes,
            np.array(run.units, dtype=np.int64),
            array.strides[0],
            span.num_tokens,
            self._num_heads,
            self._head_bytes,
        )

    def _copy_strided(self, run: _Run, layers: range, to_host: bool) -> None:
        """Copies with torch what the kernels do not know."""
        first = run.span
        row_shape = (len(layers), self._num_parts, first.num_tokens, self._num_heads * self._head_size)
        num_bytes = len(layers) * self._num_parts * first.num_tokens * self._num_heads * self._head_bytes
        for chunk, unit in enumerate(run.units):
            span = first._replace(offset=first.offset + chunk * first.num_tokens)
            data = torch.from_numpy(run.array[unit, :num_bytes]).view(self._dtype)
            slabs = data.view(row_shape)[:, self._place]
            for slab, view in zip(slabs, self._views[layers.start : layers.stop], strict=True):
                for start, pages in span_pieces(view, span):
                    rows = slab[start : start + pages.shape[0] * pages.shape[1]].view(pages.shape)
                    if to_host:
                        rows.copy_(pages)
                    else:
                        pages.copy_(rows)


class _WholePages:
    """The pages of one layer that are moved whole: states, and attention whose pages cannot be cut.

    A page is moved byte by byte in nominal order. Padding between pages, or inside one, is left out.
    """

    def __init__(self, layer: torch.Tensor) -> None:
        """``layer``: dimension 0 counts vLLM's blocks; any strides."""
        self._layer = layer
        self._num_blocks = layer.shape[0]
        self._is_contiguous = layer[:1].is_contiguous()
        self._address = layer.data_ptr()
        self._step = layer.stride(0) * layer.element_size()
        self._page_bytes = layer[:1].numel() * layer.element_size()

    def copy(self, block_id: int, stream: ObjectStream, to_host: bool) -> None:
        """Copies a block's page to or from where the stream is. Raises IndexError when there is no such block."""
        if not 0 <= block_id < self._num_blocks:  # a compiled copy would go on beyond the layer's end
            raise IndexError(f"block {block_id} is not among the layer's {self._num_blocks}")
        if self._is_contiguous:
            stream.copy(self._address + block_id * self._step, self._page_bytes, to_host)
            return
        page = torch.empty(self._layer.shape[1:], dtype=self._layer.dtype)
        if to_host:
            page.copy_(self._layer[block_id])
        stream.copy(page.data_ptr(), self._page_bytes, to_host)
        if not to_host:
            self._layer[block_id].copy_(page)


def _plan(
    placements: Sequence[Placement], buffers: Sequence[HostBuffer]
) -> Iterator[_Run | tuple[Placement, HostBuffer]]:
    """Cuts the work into runs of chunks and single objects, in order."""
    run: _Run | None = None
    for placement, buffer in zip(placements, buffers, strict=True):
        is_chunk = not placement.pages and len(placement.spans) == 1 and len(buffer.units) == 1
        if is_chunk and run is not None:
            (group_id, block_id, offset, num_tokens), first = placement.spans[0], run.span
            is_same = (group_id, block_id, num_tokens) == (first.group_id, first.block_id, first.num_tokens)
            if is_same and offset == first.offset + len(run.units) * num_tokens and buffer.array is run.array:
                run.units.append(buffer.units[0])
                continue
        if run is not None:
            yield run
            run = None
        if is_chunk:
            run = _Run(placement.spans[0], buffer.array, [buffer.units[0]])
        else:
            yield placement, buffer
    if run is not None:
        yield run
