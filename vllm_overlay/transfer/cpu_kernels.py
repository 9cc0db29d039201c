# SPDX-License-Identifier: Apache-2.0
"""Compiled copies between pages and canonical rows, where torch's strided copy is several times slower than memory.

A page's keys may be column-major, [dimension][token]. The canonical order is [token][head][dimension]. Tiles of 16
vectors are transposed in registers. Whole cache lines are streamed past the cache, so no line is read before it is
overwritten. That saves a third of the memory traffic of a copy.

All addresses, strides and sizes are in bytes unless they say tokens. Elements have 2 bytes. Callers keep the memory
alive and check the shapes: ``can_transpose`` and ``can_copy_rows``.
"""

from collections.abc import Sequence
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

TILE = 16
"""Tokens in a tile: chunks and offsets must be multiples of it."""
LINE = 64
_LINE_ELEMENTS = LINE // 2

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_BYTE_POINTER = ir.IntType(8).as_pointer()


def can_transpose(head_size: int, *tokens: int) -> bool:
    """Whether the transposing kernels take heads of this many elements and these offsets and numbers of tokens."""
    return head_size % _LINE_ELEMENTS == 0 and all(n % TILE == 0 for n in tokens)


def can_copy_rows(row_bytes: int) -> bool:
    """Whether ``copy_rows`` takes rows of this many bytes."""
    return row_bytes % LINE == 0


def _at(builder: ir.IRBuilder, address: ir.Value, offset: ir.Value, to: ir.Type) -> ir.Value:
    return builder.inttoptr(builder.add(address, offset), to.as_pointer())


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_BYTE_POINTER, _INT32, _INT32, _INT32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE_POINTER], kind)
    builder.call(function, [builder.inttoptr(address, _BYTE_POINTER), _INT32(0), _INT32(3), _INT32(1)])


def _store(builder: ir.IRBuilder, value: ir.Value, place: ir.Value, stream: bool) -> None:
    store = builder.store(value, place, align=LINE if stream else 1)
    if stream:
        store.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))


def _shuffle(builder: ir.IRBuilder, left: ir.Value, right: ir.Value, order: Sequence[int]) -> ir.Value:
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_INT32, len(order)), list(order)))


def _transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """16 vectors of 16 elements: zipping the upper with the lower half four times transposes them."""
    low = [place for pair in range(TILE // 2) for place in (pair, TILE + pair)]
    high = [place + TILE // 2 for place in low]
    for _ in range(TILE.bit_length() - 1):
        rows = [_shuffle(builder, rows[i // 2], rows[i // 2 + TILE // 2], (low, high)[i % 2]) for i in range(TILE)]
    return rows


def _tile(num_sources: int, stream: bool) -> Any:
    """Transposes 16 rows from each source to 16 target rows, in which the sources' columns lie side by side.

    ``ahead`` is the way from each source row to what will be wanted soon.
    """

    @intrinsic
    def tile(_context, first, second, source_stride, ahead, target, target_stride):  # type: ignore[no-untyped-def]
        def codegen(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
            *sources, source_step, ahead, target, target_step = arguments
            vector = ir.VectorType(ir.IntType(16), TILE)
            halves = []
            for source in sources[:num_sources]:
                rows = []
                for row in range(TILE):
                    offset = builder.mul(source_step, _INT64(row))
                    rows.append(builder.load(_at(builder, source, offset, vector), align=1))
                    _prefetch(builder, builder.add(builder.add(source, offset), ahead))
                halves.append(_transposed(builder, rows))
            for row in range(TILE):
                parts = [half[row] for half in halves]
                value = parts[0] if num_sources == 1 else _shuffle(builder, parts[0], parts[1], range(2 * TILE))
                place = _at(builder, target, builder.mul(target_step, _INT64(row)), value.type)
                _store(builder, value, place, stream)
            return _context.get_dummy_value()

        return types.void(*[types.intp] * 6), codegen

    return tile


def _line(stream: bool) -> Any:
    """Copies one cache line."""

    @intrinsic
    def line(_context, source, target):  # type: ignore[no-untyped-def]
        def codegen(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
            vector = ir.VectorType(ir.IntType(8), LINE)
            value = builder.load(_at(builder, arguments[0], _INT64(0), vector), align=1)
            _prefetch(builder, builder.add(arguments[0], _INT64(16 * LINE)))
            _store(builder, value, _at(builder, arguments[1], _INT64(0), vector), stream)
            return _context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return line


@intrinsic
def _fence(_context):  # type: ignore[no-untyped-def]
    """Streamed stores are ordered with nothing else: other threads see them after this."""

    def codegen(context, builder, _signature, _arguments):  # type: ignore[no-untyped-def]
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


_half_tile, _stream_tile = _tile(1, stream=False), _tile(2, stream=True)
_line_copy, _line_stream = _line(stream=False), _line(stream=True)


@numba.njit(nogil=True)
def copy_rows(sources, source_chunks, source_steps, targets, target_chunks, target_steps, counts, row_bytes, stream):  # type: ignore[no-untyped-def]
    """Copies rows of one token and one head each.

    ``sources`` and ``targets`` have an address for each layer. ``source_chunks`` and ``target_chunks`` have the way
    from there to each chunk. The steps lead from token to token and from head to head, and ``counts`` says how many
    there are. ``stream`` asks for targets at whole lines.
    """
    for layer in range(len(sources)):
        for chunk in range(len(source_chunks)):
            for token in range(counts[0]):
                for head in range(counts[1]):
                    source = sources[layer] + source_chunks[chunk] + token * source_steps[0] + head * source_steps[1]
                    target = targets[layer] + target_chunks[chunk] + token * target_steps[0] + head * target_steps[1]
                    if stream:
                        for at in range(0, row_bytes, LINE):
                            _line_stream(source + at, target + at)
                    else:
                        for at in range(0, row_bytes, LINE):
                            _line_copy(source + at, target + at)
    _fence()


@numba.njit(nogil=True)
def gather_columns(pages, page_steps, rows, row_chunks, row_steps, counts, row_bytes, stream):  # type: ignore[no-untyped-def]
    """Copies from pages, in which tokens lie side by side and chunk after chunk, to rows; see ``copy_rows``.

    ``page_steps`` lead from dimension to dimension and from head to head.
    """
    num_tokens, num_heads = counts
    dim_step, head_step = page_steps
    ahead = LINE if len(row_chunks) * num_tokens > 2 * _LINE_ELEMENTS else LINE * dim_step
    for layer in range(len(pages)):
        for chunk in range(len(row_chunks)):
            for head in range(num_heads):
                for token in range(0, num_tokens, TILE):
                    source = pages[layer] + head * head_step + (chunk * num_tokens + token) * 2
                    target = rows[layer] + row_chunks[chunk] + token * row_steps[0] + head * row_steps[1]
                    for at in range(0, row_bytes, LINE):
                        first = source + at // 2 * dim_step
                        second = first + TILE * dim_step
                        if stream:
                            _stream_tile(first, second, dim_step, ahead, target + at, row_steps[0])
                        else:
                            _half_tile(first, first, dim_step, ahead, target + at, row_steps[0])
                            _half_tile(second, second, dim_step, ahead, target + at + TILE * 2, row_steps[0])
    _fence()


@numba.njit(nogil=True)
def scatter_columns(rows, row_chunks, row_steps, pages, page_steps, counts, row_bytes, place):  # type: ignore[no-untyped-def]
    """The reverse. ``place`` is the first token's place in its line of the page, in tokens. -1: not known.

    Lines that are written whole are streamed. They may belong to two chunks.
    """
    num_tokens, num_heads = counts
    dim_step, head_step = page_steps
    ahead = 2 * LINE
    total = len(row_chunks) * num_tokens
    for layer in range(len(rows)):
        for head in range(num_heads):
            token = 0
            while token < total:
                whole = place >= 0 and (place + token) * 2 % LINE == 0 and token + 2 * TILE <= total
                after = token + TILE if whole else token
                first = row_chunks[token // num_tokens] + token % num_tokens * row_steps[0]
                second = row_chunks[after // num_tokens] + after % num_tokens * row_steps[0]
                source = rows[layer] + head * row_steps[1]
                target = pages[layer] + head * head_step + token * 2
                for at in range(0, row_bytes, TILE * 2):
                    left, right = source + first + at, source + second + at
                    if whole:
                        _stream_tile(left, right, row_steps[0], ahead, target + at // 2 * dim_step, dim_step)
                    else:
                        _half_tile(left, right, row_steps[0], ahead, target + at // 2 * dim_step, dim_step)
                token += 2 * TILE if whole else TILE
    _fence()


@numba.njit(nogil=True)
def copy_bytes(source, target, num_bytes):  # type: ignore[no-untyped-def]
    """One contiguous copy; ``target`` and ``num_bytes`` must be multiples of a line."""
    for at in range(0, num_bytes, LINE):
        _line_stream(source + at, target + at)
    _fence()


def prepare() -> None:
    """Compile everything now, about two seconds, rather than in the first request."""
    number, flag, addresses, pair = types.int64, types.boolean, types.int64[::1], types.UniTuple(types.int64, 2)
    copy_rows.compile((addresses, addresses, pair, addresses, addresses, pair, pair, number, flag))
    gather_columns.compile((addresses, pair, addresses, addresses, pair, pair, number, flag))
    scatter_columns.compile((addresses, addresses, pair, addresses, pair, pair, number, number))
    copy_bytes.compile((number, number, number))
