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
from vllm_overlay.transfer.page_map import Packing, PageMap

_Addresses = npt.NDArray[np.int64]


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
    """Chunks that follow each other in one block, ``span`` the first, and the rows of ``array`` they lie in."""

    span: Span
    array: Bytes
    units: list[int]


class CpuTransfer(KVTransfer):
    """Copies on the calling thread; chunks in runs, so that whole blocks move in one call."""

    def __init__(self, groups: Mapping[int, GroupTensors]) -> None:
        cpu_kernels.prepare()
        self._groups = groups
        self._handles = itertools.count(1)
        self._finished: list[FinishedCopy] = []
        self._scratch: Bytes = np.empty(0, dtype=np.uint8)
        self._halves = {
            group_id: (_Half(group.layers, group.page_map.keys, 0), _Half(group.layers, group.page_map.values, 1))
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
            for half in self._halves[span.group_id]:
                for tokens in half.views(span):
                    tokens.zero_()

    def _copy_run(self, run: _Run, *, to_host: bool) -> None:
        for half in self._halves[run.span.group_id]:
            half.copy(run, range(len(self._groups[run.span.group_id].layers)), to_host=to_host)

    def _gather_object(self, placement: Placement, buffer: HostBuffer) -> None:
        stream = _Stream(buffer)
        for row in self._raw_rows(placement):
            stream.write(row)
        for span, layers, data, in_place in self._slabs(placement, stream):
            for half in self._halves[span.group_id]:
                half.copy(_Run(span, data[None], [0]), layers, to_host=True)
            if not in_place:
                stream.write(data)
        stream.check_end()

    def _scatter_object(self, placement: Placement, buffer: HostBuffer) -> None:
        stream = _Stream(buffer)
        for row in self._raw_rows(placement):
            stream.read(row)
        for span, layers, data, in_place in self._slabs(placement, stream):
            if not in_place:
                stream.read(data)
            for half in self._halves[span.group_id]:
                half.copy(_Run(span, data[None], [0]), layers, to_host=False)
        stream.check_end()

    def _scratch_of(self, num_bytes: int) -> Bytes:
        """For one layer of a span that lies in several pieces; the same warm memory each time."""
        if self._scratch.size < num_bytes:
            self._scratch = np.empty(num_bytes, dtype=np.uint8)
        return self._scratch[:num_bytes]

    def _raw_rows(self, placement: Placement) -> Iterator[Bytes]:
        """The placement's pages as bytes, layer by layer; padding between pages is left out."""
        for group_id, block_id in placement.pages:
            for layer in self._groups[group_id].layers:
                yield layer[block_id].view(-1).view(torch.uint8).numpy()

    def _slabs(self, placement: Placement, stream: "_Stream") -> Iterator[tuple[Span, range, Bytes, bool]]:
        """The placement's spans, as many layers at once as lie in one piece, with their bytes: those of the buffer
        (True), or for a layer that lies in several pieces others to copy from or to."""
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


class _Half:
    """The keys (``place`` 0) or the values (1) in a group's pages, and copies between them and the canonical order."""

    def __init__(self, layers: Sequence[torch.Tensor], packing: Packing, place: int) -> None:
        sample = layers[0]
        self._place = place
        self._num_heads, self._head_size = sample.shape[1], sample.shape[3] // 2
        self._dtype, element_bytes = sample.dtype, sample.element_size()
        self._head_bytes = self._head_size * element_bytes
        self._views = [packing.view(layer, self._head_size) for layer in layers]
        self._pages = np.array([view.data_ptr() for view in self._views], dtype=np.int64)
        steps = [stride * element_bytes for stride in self._views[0].stride()]
        self._block_step, self._token_step, _, self._head_step, self._dim_step, _ = steps
        alike = all(view.stride() == self._views[0].stride() for view in self._views)
        plain = alike and element_bytes == 2 and packing.token_inner == packing.dim_inner == 1
        self._has_rows = plain and packing.dim_stride == 1 and cpu_kernels.can_copy_rows(self._head_size)
        self._has_columns = plain and packing.token_stride == 1

    def views(self, span: Span) -> list[torch.Tensor]:
        """The span in each layer: (token groups, tokens a group, heads, dimension groups, dimensions a group)."""
        unit = self._views[0].shape[2]
        tokens = slice(span.offset // unit, (span.offset + span.num_tokens) // unit)
        return [view[span.block_id, tokens] for view in self._views]

    def copy(self, run: _Run, layers: range, *, to_host: bool) -> None:
        """Between these layers' pages and the run's rows, which have these layers alone."""
        span = run.span
        self._check(run, len(layers))
        if self._has_rows:
            self._copy_rows(run, layers, to_host)
        elif self._has_columns and cpu_kernels.can_transpose(self._head_size, span.offset, span.num_tokens):
            self._copy_columns(run, layers, to_host)
        else:
            self._copy_strided(run, layers, to_host)

    def _check(self, run: _Run, num_layers: int) -> None:
        """Compiled copies would go on beyond the ends of a page or of the host's memory."""
        num_blocks, groups, inner = self._views[0].shape[:3]
        end = run.span.offset + len(run.units) * run.span.num_tokens
        if not (0 <= run.span.block_id < num_blocks and 0 <= run.span.offset < end <= groups * inner):
            raise IndexError(f"{run.span} and what follows it is not in {num_blocks} blocks of {groups * inner} tokens")
        num_bytes = num_layers * 2 * run.span.num_tokens * self._num_heads * self._head_bytes
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
        """Each layer's first token in the page and in the host's first unit, the way to each unit, and the rows' steps
        from token to token and head to head."""
        span = run.span
        pages = self._pages[layers.start : layers.stop]
        row_bytes = self._num_heads * self._head_bytes
        slabs = np.arange(len(layers), dtype=np.int64) * 2 + self._place
        return (
            pages + (span.block_id * self._block_step + span.offset * self._token_step),
            slabs * (span.num_tokens * row_bytes) + run.array.ctypes.data,
            np.array(run.units, dtype=np.int64) * run.array.strides[0],
            (row_bytes, self._head_bytes),
        )

    def _copy_strided(self, run: _Run, layers: range, to_host: bool) -> None:
        """With torch, for what the kernels do not know."""
        first = run.span
        width = self._num_heads * self._head_size
        num_bytes = len(layers) * 2 * first.num_tokens * self._num_heads * self._head_bytes
        for chunk, unit in enumerate(run.units):
            span = replace(first, offset=first.offset + chunk * first.num_tokens)
            data = torch.from_numpy(run.array[unit, :num_bytes]).view(self._dtype)
            slabs = data.view(len(layers), 2, span.num_tokens, width)[:, self._place]
            for slab, pages in zip(slabs, self.views(span)[layers.start : layers.stop], strict=True):
                rows = slab.view(pages.shape)
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
