# SPDX-License-Identifier: Apache-2.0
"""Transfers for KV tensors in host memory (vLLM's CPU platform)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from vllm_overlay.tiers.memory import Bytes, HostBuffer
from vllm_overlay.transfer.base import KVTransfer, Placement, Span
from vllm_overlay.transfer.layout import PageMap


@dataclass(frozen=True, slots=True)
class GroupTensors:
    """The registered tensors of one KV cache group, one a layer, and the map of their pages (None: moved whole)."""

    layers: tuple[torch.Tensor, ...]
    page_map: PageMap | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers, keys and values; for a group that can be cut."""
        return sum(layer.shape[1] * layer.shape[3] * layer.element_size() for layer in self.layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block's pages, all layers."""
        return sum(layer[0].numel() * layer.element_size() for layer in self.layers)


@dataclass(frozen=True, slots=True)
class _Run:
    """Spans that follow each other in one block, and host units that follow each other: one copy a layer."""

    span: Span
    num_chunks: int
    array: Bytes
    first_unit: int


class CpuTransfer(KVTransfer):
    """Copies with torch on the calling thread; chunks in runs, so that whole blocks move in one call a layer."""

    def __init__(self, groups: Mapping[int, GroupTensors]) -> None:
        self._groups = groups
        self._views: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for group_id, group in groups.items():
            if (page_map := group.page_map) is not None:
                self._views[group_id] = [
                    (page_map.keys.view(layer, layer.shape[3] // 2), page_map.values.view(layer, layer.shape[3] // 2))
                    for layer in group.layers
                ]

    def gather(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer]) -> None:
        for item in _plan(placements, buffers):
            if isinstance(item, _Run):
                self._copy_run(item, to_host=True)
            else:
                self._gather_object(*item)

    def scatter(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer]) -> None:
        for item in _plan(placements, buffers):
            if isinstance(item, _Run):
                self._copy_run(item, to_host=False)
            else:
                self._scatter_object(*item)

    def zero(self, spans: Sequence[Span]) -> None:
        for span in spans:
            for keys, values in self._span_views(span):
                keys.zero_()
                values.zero_()

    def _span_views(self, span: Span) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(token groups, tokens a group, heads, dimension groups, dimensions a group), keys and values, by layer."""
        for keys, values in self._views[span.group_id]:
            yield _token_range(keys, span), _token_range(values, span)

    def _copy_run(self, run: _Run, *, to_host: bool) -> None:
        span, count = run.span, run.num_chunks
        whole = Span(span.group_id, span.block_id, span.offset, span.num_tokens * count)
        host = self._host_chunks(run)
        for layer, views in enumerate(self._span_views(whole)):
            for half, view in enumerate(views):
                _copy(view.unflatten(0, (count, -1)), host[:, layer, half], to_host=to_host)

    def _host_chunks(self, run: _Run) -> torch.Tensor:
        """The run's host units as (chunks, layers, key/value, tokens, heads x dimensions) of the cache's dtype."""
        group = self._groups[run.span.group_id]
        num_bytes = run.span.num_tokens * group.token_bytes
        rows = torch.from_numpy(run.array[run.first_unit : run.first_unit + run.num_chunks, :num_bytes])
        sample = group.layers[0]
        shape = (run.num_chunks, len(group.layers), 2, run.span.num_tokens, sample.shape[1] * sample.shape[3] // 2)
        return rows.view(sample.dtype).view(shape)

    def _gather_object(self, placement: Placement, buffer: HostBuffer) -> None:
        stream = _Segments(buffer)
        for group_id, block_id in placement.pages:
            for layer in self._groups[group_id].layers:
                stream.write(_raw_row(layer, block_id))
        for span in placement.spans:
            host = self._empty_span(span)
            for layer_index, views in enumerate(self._span_views(span)):
                for half, view in enumerate(views):
                    _copy(view, host[layer_index, half], to_host=True)
            stream.write(host.view(torch.uint8).flatten())
        stream.check_end()

    def _scatter_object(self, placement: Placement, buffer: HostBuffer) -> None:
        stream = _Segments(buffer)
        for group_id, block_id in placement.pages:
            for layer in self._groups[group_id].layers:
                stream.read(_raw_row(layer, block_id))
        for span in placement.spans:
            host = self._empty_span(span)
            stream.read(host.view(torch.uint8).flatten())
            for layer_index, views in enumerate(self._span_views(span)):
                for half, view in enumerate(views):
                    _copy(view, host[layer_index, half], to_host=False)
        stream.check_end()

    def _empty_span(self, span: Span) -> torch.Tensor:
        group = self._groups[span.group_id]
        sample = group.layers[0]
        return torch.empty(
            (len(group.layers), 2, span.num_tokens, sample.shape[1] * sample.shape[3] // 2), dtype=sample.dtype
        )


def _plan(
    placements: Sequence[Placement], buffers: Sequence[HostBuffer]
) -> Iterator[_Run | tuple[Placement, HostBuffer]]:
    """Cuts the work into runs of chunks and single objects, in order."""
    run: _Run | None = None
    for placement, buffer in zip(placements, buffers, strict=True):
        is_chunk = not placement.pages and len(placement.spans) == 1 and len(buffer.units) == 1
        if run is not None and is_chunk and _continues(run, placement.spans[0], buffer):
            run = _Run(run.span, run.num_chunks + 1, run.array, run.first_unit)
            continue
        if run is not None:
            yield run
            run = None
        if is_chunk:
            run = _Run(placement.spans[0], 1, buffer.array, buffer.units[0])
        else:
            yield placement, buffer
    if run is not None:
        yield run


def _continues(run: _Run, span: Span, buffer: HostBuffer) -> bool:
    first = run.span
    return (
        (span.group_id, span.block_id, span.num_tokens) == (first.group_id, first.block_id, first.num_tokens)
        and span.offset == first.offset + run.num_chunks * first.num_tokens
        and buffer.array is run.array
        and buffer.units[0] == run.first_unit + run.num_chunks
    )


def _token_range(view: torch.Tensor, span: Span) -> torch.Tensor:
    unit = view.shape[2]
    return view[span.block_id, span.offset // unit : (span.offset + span.num_tokens) // unit]


def _copy(pages: torch.Tensor, host: torch.Tensor, *, to_host: bool) -> None:
    """``pages`` is (..., token groups, inner, heads, dimension groups, inner); ``host`` (..., tokens, heads x dim)."""
    host = host.unflatten(-2, pages.shape[-5:-3]).unflatten(-1, pages.shape[-3:])
    if to_host:
        host.copy_(pages)
    else:
        pages.copy_(host)


def _raw_row(layer: torch.Tensor, block_id: int) -> torch.Tensor:
    """One block's page of one layer as bytes; pages are contiguous inside, padding between them is left out."""
    return layer[block_id].view(-1).view(torch.uint8)


class _Segments:
    """Reads or writes an object's buffer from its first byte to its last, across unit borders."""

    def __init__(self, buffer: HostBuffer) -> None:
        self._segments = [torch.from_numpy(segment) for segment in buffer.segments()]
        self._index = 0
        self._offset = 0

    def write(self, data: torch.Tensor) -> None:
        for part, piece in self._pieces(data):
            piece.copy_(part)

    def read(self, into: torch.Tensor) -> None:
        for part, piece in self._pieces(into):
            part.copy_(piece)

    def check_end(self) -> None:
        if self._index != len(self._segments):
            raise ValueError("the object's placement is shorter than its buffer")

    def _pieces(self, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        while start < data.numel():
            segment = self._segments[self._index]
            count = min(data.numel() - start, segment.numel() - self._offset)
            yield data[start : start + count], segment[self._offset : self._offset + count]
            start += count
            self._offset += count
            if self._offset == segment.numel():
                self._index += 1
                self._offset = 0
