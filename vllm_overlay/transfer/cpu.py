# SPDX-License-Identifier: Apache-2.0
"""Transfers for KV tensors in host memory (vLLM's CPU platform)."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.tiers.memory import Bytes, HostBuffer
from vllm_overlay.transfer import cpu_kernels
from vllm_overlay.transfer.base import FinishedCopy, Handle, KVTransfer, Placement, Span
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_map import PageMap, span_pieces

_Addresses = npt.NDArray[np.int64]


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
        cpu_kernels.prepare()
        self._groups = groups
        self._handles = itertools.count(1)
        self._finished: list[FinishedCopy] = []
        self._scratch: Bytes = np.empty(0, dtype=np.uint8)
        self._parts = {
            group_id: _parts(group.page_map, group.layers)
            for group_id, group in groups.items()
            if group.page_map is not None
        }

    def gather(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer]) -> Handle:
        return self._finish(partial(self._gather, placements, buffers))

    def scatter(
        self, placements: Sequence[Placement], buffers: Sequence[HostBuffer], zeros: Sequence[Span] = ()
    ) -> Handle:
        return self._finish(partial(self._scatter, placements, buffers, zeros))

    def poll(self) -> list[FinishedCopy]:
        finished, self._finished = self._finished, []
        return finished

    def _finish(self, copy: Callable[[], None]) -> Handle:
        """Copies at once; the handle is finished when it is given out."""
        handle = Handle(next(self._handles))
        error: BaseException | None = None
        try:
            copy()
        except SHUTDOWN:
            raise
        except BaseException as raised:
            error = raised
        self._finished.append(FinishedCopy(handle, error))
        return handle

    def _gather(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer]) -> None:
        for item in _plan(placements, buffers):
            if isinstance(item, _Run):
                self._copy_run(item, to_host=True)
            else:
                self._gather_object(*item)

    def _scatter(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer], zeros: Sequence[Span]) -> None:
        for item in _plan(placements, buffers):
            if isinstance(item, _Run):
                self._copy_run(item, to_host=False)
            else:
                self._scatter_object(*item)
        self._zero(zeros)

    def _zero(self, spans: Sequence[Span]) -> None:
        for span in spans:
            for part in self._parts[span.group_id]:
                part.zero(span)

    def _copy_run(self, run: _Run, *, to_host: bool) -> None:
        for part in self._parts[run.span.group_id]:
            part.copy(run, range(len(self._groups[run.span.group_id].layers)), to_host=to_host)

    def _gather_object(self, placement: Placement, buffer: HostBuffer) -> None:
        stream = _Stream(buffer)
        for page in self._pages(placement):
            stream.write(_row(page))
        for span, layers, data, in_place in self._slabs(placement, stream):
            for part in self._parts[span.group_id]:
                part.copy(_Run(span, data[None], [0]), layers, to_host=True)
            if not in_place:
                stream.write(data)
        stream.check_end()

    def _scatter_object(self, placement: Placement, buffer: HostBuffer) -> None:
        stream = _Stream(buffer)
        for page in self._pages(placement):
            self._read_page(stream, page)
        for span, layers, data, in_place in self._slabs(placement, stream):
            if not in_place:
                stream.read(data)
            for part in self._parts[span.group_id]:
                part.copy(_Run(span, data[None], [0]), layers, to_host=False)
        stream.check_end()

    def _scratch_of(self, num_bytes: int) -> Bytes:
        """For one layer of a span that lies in several pieces; the same warm memory each time."""
        if self._scratch.size < num_bytes:
            self._scratch = np.empty(num_bytes, dtype=np.uint8)
        return self._scratch[:num_bytes]

    def _pages(self, placement: Placement) -> Iterator[torch.Tensor]:
        """The placement's pages as bytes, layer by layer, with the layers' strides; padding is left out."""
        for group_id, block_id in placement.pages:
            for layer in self._groups[group_id].layers:
                yield layer[block_id].view(torch.uint8)

    def _read_page(self, stream: "_Stream", page: torch.Tensor) -> None:
        if page.is_contiguous():
            stream.read(_row(page))
        else:
            row = self._scratch_of(page.numel())
            stream.read(row)
            page.copy_(torch.from_numpy(row).view(page.shape))

    def _slabs(self, placement: Placement, stream: "_Stream") -> Iterator[tuple[Span, range, Bytes, bool]]:
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


def _row(page: torch.Tensor) -> Bytes:
    """A page's bytes in nominal order: where they lie, or a copy where they do not follow each other."""
    row: Bytes = page.contiguous().view(-1).numpy()
    return row


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
        _, groups, unit, self._num_heads, *content = sample.shape
        self._block_size = groups * unit
        self._head_size = content[0] * content[1]
        self._dtype, element_bytes = sample.dtype, sample.element_size()
        self._head_bytes = self._head_size * element_bytes
        self._pages = np.array([view.data_ptr() for view in views], dtype=np.int64)
        steps = [stride * element_bytes for stride in sample.stride()]
        self._block_step, self._token_step, _, self._head_step, self._dim_step, _ = steps
        alike = all((view.shape, view.stride()) == (sample.shape, sample.stride()) for view in views)
        plain = alike and unit == content[1] == 1
        self._has_rows = plain and self._dim_step == element_bytes and cpu_kernels.can_copy_rows(self._head_bytes)
        self._has_columns = plain and self._token_step == element_bytes == 2

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
            self._copy_rows(run, layers, to_host)
        elif self._has_columns and cpu_kernels.can_transpose(self._head_size, span.offset, span.num_tokens):
            self._copy_columns(run, layers, to_host)
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

    def _copy_rows(self, run: _Run, layers: range, to_host: bool) -> None:
        pages, rows, row_chunks, row_steps = self._addresses(run, layers)
        page_chunks = np.arange(len(run.units), dtype=np.int64) * (run.span.num_tokens * self._token_step)
        page_steps = (self._token_step, self._head_step)
        page_side, row_side = (pages, page_chunks, page_steps), (rows, row_chunks, row_steps)
        source, target = (page_side, row_side) if to_host else (row_side, page_side)
        stream = _at_lines(*target[0], *target[1], *target[2])
        cpu_kernels.copy_rows(*source, *target, self._counts(run), self._head_bytes, stream)

    def _copy_columns(self, run: _Run, layers: range, to_host: bool) -> None:
        pages, rows, row_chunks, row_steps = self._addresses(run, layers)
        page_steps = (self._dim_step, self._head_step)
        if to_host:
            stream = _at_lines(*rows, *row_chunks, *row_steps)
            cpu_kernels.gather_columns(
                pages, page_steps, rows, row_chunks, row_steps, self._counts(run), self._head_bytes, stream
            )
        else:
            first = run.span.offset * self._token_step
            place = run.span.offset if _at_lines(*(pages - first), *page_steps) else -1
            cpu_kernels.scatter_columns(
                rows, row_chunks, row_steps, pages, page_steps, self._counts(run), self._head_bytes, place
            )

    def _counts(self, run: _Run) -> tuple[int, int]:
        return run.span.num_tokens, self._num_heads

    def _addresses(self, run: _Run, layers: range) -> tuple[_Addresses, _Addresses, _Addresses, tuple[int, int]]:
        """Where compiled copies begin and how they go on.

        Returns each layer's first token in the page, the same in the host's first unit, and the way to each unit. Last
        come the rows' steps from token to token and from head to head.
        """
        span = run.span
        pages = self._pages[layers.start : layers.stop]
        row_bytes = self._num_heads * self._head_bytes
        slabs = np.arange(len(layers), dtype=np.int64) * self._num_parts + self._place
        return (
            pages + (span.block_id * self._block_step + span.offset * self._token_step),
            slabs * (span.num_tokens * row_bytes) + run.array.ctypes.data,
            np.array(run.units, dtype=np.int64) * run.array.strides[0],
            (row_bytes, self._head_bytes),
        )

    def _copy_strided(self, run: _Run, layers: range, to_host: bool) -> None:
        """Copies with torch what the kernels do not know."""
        first = run.span
        row_shape = (len(layers), self._num_parts, first.num_tokens, self._num_heads * self._head_size)
        num_bytes = len(layers) * self._num_parts * first.num_tokens * self._num_heads * self._head_bytes
        for chunk, unit in enumerate(run.units):
            span = replace(first, offset=first.offset + chunk * first.num_tokens)
            data = torch.from_numpy(run.array[unit, :num_bytes]).view(self._dtype)
            slabs = data.view(row_shape)[:, self._place]
            for slab, view in zip(slabs, self._views[layers.start : layers.stop], strict=True):
                for start, pages in span_pieces(view, span):
                    rows = slab[start : start + pages.shape[0] * pages.shape[1]].view(pages.shape)
                    if to_host:
                        rows.copy_(pages)
                    else:
                        pages.copy_(rows)


def _at_lines(*numbers: int) -> bool:
    """Whether all of these addresses and steps are multiples of a cache line."""
    return all(number % cpu_kernels.LINE == 0 for number in numbers)


def _plan(
    placements: Sequence[Placement], buffers: Sequence[HostBuffer]
) -> Iterator[_Run | tuple[Placement, HostBuffer]]:
    """Cuts the work into runs of chunks and single objects, in order."""
    run: _Run | None = None
    for placement, buffer in zip(placements, buffers, strict=True):
        is_chunk = not placement.pages and len(placement.spans) == 1 and len(buffer.units) == 1
        if run is not None and is_chunk and _continues(run, placement.spans[0], buffer):
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


def _continues(run: _Run, span: Span, buffer: HostBuffer) -> bool:
    first = run.span
    return (
        span.offset == first.offset + len(run.units) * first.num_tokens
        and (span.block_id, span.group_id, span.num_tokens) == (first.block_id, first.group_id, first.num_tokens)
        and buffer.array is run.array
    )


class _Stream:
    """An object's buffer from its first byte to its last, across unit borders. Units that follow each other are one."""

    def __init__(self, buffer: HostBuffer) -> None:
        flat = buffer.array.view()
        flat.shape = (-1,)  # raises where a reshape would copy
        self._segments: list[Bytes] = [flat[start:end] for start, end in _ranges(buffer)]
        self._index = 0
        self._offset = 0

    @property
    def piece_bytes(self) -> int:
        """How many of the next bytes lie in one piece."""
        return self._segments[self._index].size - self._offset if self._index < len(self._segments) else 0

    def take(self, num_bytes: int) -> Bytes:
        """The next ``num_bytes``, at most ``piece_bytes``, where they lie."""
        piece = self._segments[self._index][self._offset : self._offset + num_bytes]
        self._offset += num_bytes
        if self._offset == self._segments[self._index].size:
            self._index += 1
            self._offset = 0
        return piece

    def write(self, data: Bytes) -> None:
        for part, piece in self._pieces(data):
            _copy_bytes(part, piece)

    def read(self, into: Bytes) -> None:
        for part, piece in self._pieces(into):
            _copy_bytes(piece, part)

    def check_end(self) -> None:
        if self._index != len(self._segments):
            raise ValueError("the object's placement is shorter than its buffer")

    def _pieces(self, data: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        start = 0
        while start < data.size:
            if not self.piece_bytes:
                raise ValueError("the object's placement is longer than its buffer")
            piece = self.take(min(data.size - start, self.piece_bytes))
            yield data[start : start + piece.size], piece
            start += piece.size


def _ranges(buffer: HostBuffer) -> list[tuple[int, int]]:
    """Where the object's bytes lie in the pool, in order."""
    unit_bytes = buffer.array.shape[1]
    ranges: list[tuple[int, int]] = []
    left = buffer.num_bytes
    for unit in buffer.units:
        start, left = unit * unit_bytes, left - (take := min(left, unit_bytes))
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], start + take)
        else:
            ranges.append((start, start + take))
    if left:
        raise ValueError(f"{len(buffer.units)} units of {unit_bytes} bytes do not hold {buffer.num_bytes} bytes")
    return ranges


def _copy_bytes(source: Bytes, target: Bytes) -> None:
    whole = source.size - source.size % cpu_kernels.LINE if _at_lines(target.ctypes.data) else 0
    cpu_kernels.copy_bytes(source.ctypes.data, target.ctypes.data, whole)
    target[whole:] = source[whole:]
