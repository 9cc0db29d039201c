# SPDX-License-Identifier: Apache-2.0
"""Compiled copies between pages and canonical rows, where torch's strided copy is several times slower than memory.

A page's keys may be column-major, [dimension][token], or lie in the tiles of AMX. The canonical order is
[token][head][dimension]. Tiles of 16 vectors are transposed in registers. Whole cache lines are streamed past the
cache, so no line is read before it is overwritten. That saves a third of the memory traffic of a copy.

All addresses, strides and sizes are in bytes unless they say tokens. Elements have 2 bytes. Callers keep the memory
alive and check the shapes: ``can_transpose`` and ``can_copy_rows``.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

TILE = 16
"""Tokens in a tile: chunks and offsets must be multiples of it."""
LINE = 64
_LINE_ELEMENTS = LINE // 2

_njit = partial(numba.njit, cache="NUMBA_CACHE_DIR" in os.environ)
"""What is compiled is kept where numba's own variable says, if it says anything: numba would choose a directory by
itself, and would not start where it finds none to write to."""

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_BYTE_POINTER = ir.IntType(8).as_pointer()


def can_transpose(head_size: int, *tokens: int) -> bool:
    """Whether the transposing kernels take heads of this many elements and these offsets and numbers of tokens."""
    return head_size % _LINE_ELEMENTS == 0 and not any(map(TILE.__rmod__, tokens))


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


def _tile(num_sources: int, stream: bool, element_bits: int = 16) -> Any:
    """Transposes 16 rows of 16 elements from each source to 16 target rows, in which the sources' columns lie side by
    side.

    ``ahead`` is the way from each source row to what will be wanted soon.
    """

    @intrinsic
    def tile(_context, first, second, source_stride, ahead, target, target_stride):  # type: ignore[no-untyped-def]
        def codegen(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
            *sources, source_step, ahead, target, target_step = arguments
            vector = ir.VectorType(ir.IntType(element_bits), TILE)
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


def _pair(is_split: bool, stream: bool) -> Any:
    """Two lines of elements that take turns become one of the first and one of the second, or the reverse."""
    together = [place + half for place in range(_LINE_ELEMENTS) for half in (0, _LINE_ELEMENTS)]
    orders = [together[:_LINE_ELEMENTS], together[_LINE_ELEMENTS:]]
    if is_split:
        orders = [list(range(half, 2 * _LINE_ELEMENTS, 2)) for half in (0, 1)]

    @intrinsic
    def pair(_context, first, second, target, other):  # type: ignore[no-untyped-def]
        def codegen(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
            vector = ir.VectorType(ir.IntType(16), _LINE_ELEMENTS)
            lines = []
            for source in arguments[:2]:
                lines.append(builder.load(_at(builder, source, _INT64(0), vector), align=1))
                _prefetch(builder, builder.add(source, _INT64(16 * LINE)))
            for place, order in zip(arguments[2:], orders, strict=True):
                _store(
                    builder,
                    _shuffle(builder, lines[0], lines[1], order),
                    _at(builder, place, _INT64(0), vector),
                    stream,
                )
            return _context.get_dummy_value()

        return types.void(*[types.intp] * 4), codegen

    return pair


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
_word_tile, _word_tile_stream = _tile(1, stream=False, element_bits=32), _tile(1, stream=True, element_bits=32)
_line_copy, _line_stream = _line(stream=False), _line(stream=True)
_split, _split_stream = _pair(is_split=True, stream=False), _pair(is_split=True, stream=True)
_join, _join_stream = _pair(is_split=False, stream=False), _pair(is_split=False, stream=True)


@_njit(inline="always")
def _at_lines(address, token_step, head_step):  # type: ignore[no-untyped-def]
    """Whether all cells from ``address`` on begin at whole lines."""
    return (address | token_step | head_step) % LINE == 0


@_njit(nogil=True)
def copy_rows(  # type: ignore[no-untyped-def]
    pages, page_at, token_step, head_step, host, slab_step, units, unit_step, num_tokens, num_heads, row_bytes, to_host
):
    """Copies rows of one token and one head each between pages and units of host memory.

    ``pages`` has each layer's first block. From there ``page_at`` leads to the first chunk's first token, the steps
    from token to token and from head to head. Chunks of ``num_tokens`` follow each other in the page; ``units`` are
    theirs in host memory. There a layer's slab begins ``slab_step`` after the one before, the first at ``host`` in unit
    0, and units are ``unit_step`` apart. A slab has token after token, head after head.
    """
    host_token_step = num_heads * row_bytes
    for layer in range(len(pages)):
        for chunk in range(len(units)):
            page = pages[layer] + page_at + chunk * num_tokens * token_step
            slab = host + layer * slab_step + units[chunk] * unit_step
            stream = _at_lines(slab, host_token_step, row_bytes) if to_host else _at_lines(page, token_step, head_step)
            for token in range(num_tokens):
                for head in range(num_heads):
                    cell = page + token * token_step + head * head_step
                    row = slab + token * host_token_step + head * row_bytes
                    source, target = (cell, row) if to_host else (row, cell)
                    if stream:
                        for at in range(0, row_bytes, LINE):
                            _line_stream(source + at, target + at)
                    else:
                        for at in range(0, row_bytes, LINE):
                            _line_copy(source + at, target + at)
    _fence()


@_njit(nogil=True)
def gather_columns(  # type: ignore[no-untyped-def]
    pages, page_at, dim_step, head_step, host, slab_step, units, unit_step, num_tokens, num_heads, row_bytes
):
    """Copies from pages, in which tokens lie side by side and chunk after chunk, to host memory; see ``copy_rows``.

    In a page the steps lead from dimension to dimension and from head to head.
    """
    token_step = num_heads * row_bytes
    ahead = LINE if len(units) * num_tokens > 2 * _LINE_ELEMENTS else LINE * dim_step
    for layer in range(len(pages)):
        for chunk in range(len(units)):
            slab = host + layer * slab_step + units[chunk] * unit_step
            stream = _at_lines(slab, token_step, row_bytes)
            for head in range(num_heads):
                for token in range(0, num_tokens, TILE):
                    source = pages[layer] + page_at + head * head_step + (chunk * num_tokens + token) * 2
                    target = slab + token * token_step + head * row_bytes
                    for at in range(0, row_bytes, LINE):
                        first = source + at // 2 * dim_step
                        second = first + TILE * dim_step
                        if stream:
                            _stream_tile(first, second, dim_step, ahead, target + at, token_step)
                        else:
                            _half_tile(first, first, dim_step, ahead, target + at, token_step)
                            _half_tile(second, second, dim_step, ahead, target + at + TILE * 2, token_step)
    _fence()


@_njit(nogil=True)
def scatter_columns(  # type: ignore[no-untyped-def]
    pages, page_at, dim_step, head_step, host, slab_step, units, unit_step, num_tokens, num_heads, row_bytes
):
    """The reverse. Lines of a page that are written whole are streamed. They may belong to two chunks."""
    token_step = num_heads * row_bytes
    ahead = 2 * LINE
    total = len(units) * num_tokens
    for layer in range(len(pages)):
        first_page = pages[layer] + page_at
        # The first token's place in its line of the page; which tokens fill a line is known where all rows are alike.
        place = first_page % LINE // 2
        is_known = (dim_step | head_step) % LINE == 0 and first_page % 2 == 0
        for head in range(num_heads):
            token = 0
            while token < total:
                whole = is_known and (place + token) * 2 % LINE == 0 and token + 2 * TILE <= total
                after = token + TILE if whole else token
                slab = host + layer * slab_step + head * row_bytes
                left = slab + units[token // num_tokens] * unit_step + token % num_tokens * token_step
                right = slab + units[after // num_tokens] * unit_step + after % num_tokens * token_step
                target = first_page + head * head_step + token * 2
                for at in range(0, row_bytes, TILE * 2):
                    if whole:
                        _stream_tile(left + at, right + at, token_step, ahead, target + at // 2 * dim_step, dim_step)
                    else:
                        _half_tile(left + at, right + at, token_step, ahead, target + at // 2 * dim_step, dim_step)
                token += 2 * TILE if whole else TILE
    _fence()


@_njit(nogil=True)
def copy_key_tiles(  # type: ignore[no-untyped-def]
    pages, page_at, tile_step, head_step, host, slab_step, units, unit_step, num_tokens, num_heads, row_bytes, to_host
):
    """Copies between host memory and pages of AMX's keys; see ``copy_rows``.

    16 tokens are a tile, ``tile_step`` before the next. It has a line for two dimensions: those of each token.
    """
    token_step = num_heads * row_bytes
    for layer in range(len(pages)):
        for chunk in range(len(units)):
            page = pages[layer] + page_at + chunk * (num_tokens // TILE) * tile_step
            slab = host + layer * slab_step + units[chunk] * unit_step
            stream = _at_lines(slab, token_step, row_bytes) if to_host else _at_lines(page, tile_step, head_step)
            for head in range(num_heads):
                for tile in range(num_tokens // TILE):
                    cells = page + tile * tile_step + head * head_step
                    rows = slab + tile * TILE * token_step + head * row_bytes
                    for at in range(0, row_bytes, LINE):
                        if to_host and stream:
                            _word_tile_stream(cells + at * TILE, 0, LINE, 16 * LINE, rows + at, token_step)
                        elif to_host:
                            _word_tile(cells + at * TILE, 0, LINE, 16 * LINE, rows + at, token_step)
                        elif stream:
                            _word_tile_stream(rows + at, 0, token_step, LINE, cells + at * TILE, LINE)
                        else:
                            _word_tile(rows + at, 0, token_step, LINE, cells + at * TILE, LINE)
    _fence()


@_njit(nogil=True)
def copy_value_tiles(  # type: ignore[no-untyped-def]
    pages, page_at, tile_step, head_step, host, slab_step, units, unit_step, num_tokens, num_heads, row_bytes, to_host
):
    """Copies between host memory and pages of AMX's values; see ``copy_rows``.

    16 dimensions are a tile, ``tile_step`` before the next. It has a line for two tokens: those of each dimension.
    """
    token_step = num_heads * row_bytes
    for layer in range(len(pages)):
        for chunk in range(len(units)):
            page = pages[layer] + page_at + chunk * (num_tokens // 2) * LINE
            slab = host + layer * slab_step + units[chunk] * unit_step
            stream = _at_lines(slab, token_step, row_bytes) if to_host else _at_lines(page, tile_step, head_step)
            for head in range(num_heads):
                for at in range(0, row_bytes, LINE):
                    cells = page + head * head_step + at // (2 * TILE) * tile_step
                    rows = slab + head * row_bytes + at
                    for _ in range(num_tokens // 2):
                        if to_host and stream:
                            _split_stream(cells, cells + tile_step, rows, rows + token_step)
                        elif to_host:
                            _split(cells, cells + tile_step, rows, rows + token_step)
                        elif stream:
                            _join_stream(rows, rows + token_step, cells, cells + tile_step)
                        else:
                            _join(rows, rows + token_step, cells, cells + tile_step)
                        cells += LINE
                        rows += 2 * token_step
    _fence()


@_njit(nogil=True)
def copy_bytes(source, target, num_bytes):  # type: ignore[no-untyped-def]
    """One contiguous copy; ``target`` and ``num_bytes`` must be multiples of a line."""
    for at in range(0, num_bytes, LINE):
        _line_stream(source + at, target + at)
    _fence()


def prepare(has_tiles: bool) -> None:
    """Compile everything now, rather than in the first request: a second or two, or less if it was kept. What is for
    the tiles of AMX only where there are any."""
    number, addresses = types.int64, types.int64[::1]
    columns = (addresses, number, number, number, number, number, addresses, *[number] * 4)
    copy_rows.compile((*columns, types.boolean))
    gather_columns.compile(columns)
    scatter_columns.compile(columns)
    copy_bytes.compile((number, number, number))
    if has_tiles:
        copy_key_tiles.compile((*columns, types.boolean))
        copy_value_tiles.compile((*columns, types.boolean))
