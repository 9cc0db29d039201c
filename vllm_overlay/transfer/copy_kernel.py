# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that executes a table of copies in one launch. Run by Triton's interpreter only, never on a GPU.

A copy's bytes are taken as one sequence of vectors over all its rows. So short rows keep as many lanes busy as long
ones. Addresses may be those of pinned host memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_overlay.transfer.copy_table import NUM_FIELDS

LANES = 512
"""Vectors that one program copies at a time."""
_STRIDES = 4
"""How often, at least, a program does that before another one shares a copy with it."""
_MAX_PROGRAMS_A_COPY = 64
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def copy_rows(table: torch.Tensor, vector_bytes: int, largest_bytes: int, *, only_clear: bool = False) -> None:
    """Launch the copies of a table on the current stream.

    Args:
        table: ``CopyTable.fields`` where the device can read them, (6, copies) int64.
        vector_bytes: ``CopyTable.vector_bytes``.
        largest_bytes: ``CopyTable.largest_bytes``; a copy has fewer than 2**31 vectors.
        only_clear: Zeros to the targets; the sources are not looked at.
    """
    num_fields, num_copies = table.shape
    assert num_fields == NUM_FIELDS and table.is_contiguous()
    programs = -(-largest_bytes // (_STRIDES * LANES * vector_bytes))
    grid = (num_copies, min(programs, _MAX_PROGRAMS_A_COPY))
    _copy_kernel[grid](table, num_copies, **variant(vector_bytes, only_clear=only_clear))


def prepare(device: torch.device) -> None:
    """Compile all variants before the first step needs one. Called at start. Each copies nothing, once."""
    table = torch.zeros((NUM_FIELDS, 1), dtype=torch.int64, device=device)
    for vector_bytes in (16, 8, 4, 2, 1):
        for only_clear in (False, True):
            copy_rows(table, vector_bytes, 1, only_clear=only_clear)


def variant(vector_bytes: int, *, only_clear: bool) -> dict[str, Any]:
    """The constants that the kernel is compiled for."""
    word_bytes = min(vector_bytes, 8)
    return {
        "WORD": _WORDS[word_bytes],
        "WORD_BYTES": word_bytes,
        "NUM_WORDS": vector_bytes // word_bytes,
        "NUM_LANES": LANES,
        "ONLY_CLEAR": only_clear,
    }


@triton.jit(do_not_specialize=["num_copies"])  # type: ignore[untyped-decorator]
def _copy_kernel(  # type: ignore[no-untyped-def]
    table,
    num_copies,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    NUM_LANES: tl.constexpr,
    ONLY_CLEAR: tl.constexpr,
):
    """Programs (copy, share of its vectors). A vector is one word, or two of 8 bytes that are moved as 16."""
    VECTOR_BYTES: tl.constexpr = NUM_WORDS * WORD_BYTES
    field = table + tl.program_id(0)
    source = tl.load(field)
    target = tl.load(field + num_copies)
    rows = tl.load(field + 2 * num_copies)
    row_vectors = (tl.load(field + 3 * num_copies) // VECTOR_BYTES).to(tl.int32)
    source_step = tl.load(field + 4 * num_copies)
    target_step = tl.load(field + 5 * num_copies)
    num_vectors = rows.to(tl.int32) * row_vectors
    lanes = tl.arange(0, NUM_LANES)
    words = tl.arange(0, NUM_WORDS)
    for first in range(tl.program_id(1) * NUM_LANES, num_vectors, tl.num_programs(1) * NUM_LANES):
        vector = first + lanes
        row = vector // row_vectors
        place = (vector - row * row_vectors).to(tl.int64) * VECTOR_BYTES
        mask = (vector < num_vectors)[:, None]
        row = row.to(tl.int64)
        to = (target + row * target_step + place).to(tl.pointer_type(WORD))[:, None] + words[None, :]
        to = tl.multiple_of(to, (VECTOR_BYTES, VECTOR_BYTES))
        if ONLY_CLEAR:
            data = tl.zeros((NUM_LANES, NUM_WORDS), dtype=WORD)
        else:
            at = (source + row * source_step + place).to(tl.pointer_type(WORD))[:, None] + words[None, :]
            at = tl.multiple_of(at, (VECTOR_BYTES, VECTOR_BYTES))
            data = tl.load(at, mask=mask, other=0)
        tl.store(to, data, mask=mask)
