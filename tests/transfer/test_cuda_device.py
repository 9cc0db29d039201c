# SPDX-License-Identifier: Apache-2.0
"""Copies reach vLLM's batch copy as it takes them: its own Python over a stand-in for the CUDA build's operator."""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from vllm_overlay.transfer.copy_table import CopyTable
from vllm_overlay.transfer.cuda_device import CudaStream

STREAM: Any = object()


class Operator:
    """What the CUDA build registers as ``swap_blocks_batch``, which the CPU build lacks: copies at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, bool]] = []
        """The current stream, and whether sources may be read ahead of it."""
        self._current: object = None

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self._current = stream
        yield
        self._current = None

    def __call__(self, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, any_order: bool) -> None:
        self.calls.append((self._current, any_order))
        for source, target, size in zip(*map(numbers, (sources, targets, sizes)), strict=True):
            ctypes.memmove(target, source, size)


def numbers(tensor: torch.Tensor) -> list[int]:
    """As the operator reads them: 64 bits each, one after the other."""
    assert tensor.dtype == torch.int64
    return list((ctypes.c_int64 * len(tensor)).from_address(tensor.data_ptr()))


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    operator = Operator()
    monkeypatch.setattr(torch.cuda, "stream", operator.stream)
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define("swap_blocks_batch(Tensor src, Tensor dst, Tensor sizes, bool any_order) -> ()")
    library.impl("swap_blocks_batch", operator, "CPU")
    yield operator
    library._destroy()


def scattered(count: int) -> tuple[CopyTable, np.ndarray, np.ndarray]:
    """Copies of different sizes in reversed order, chosen from more, so that the fields are no plain array."""
    source = np.arange(10 * count, dtype=np.uint8)
    target = np.zeros_like(source)
    table = CopyTable.of(
        [
            (source.ctypes.data + 10 * place, target.ctypes.data + 10 * (count - 1 - place), 1, 1 + place, 0, 0)
            for place in range(count)
        ]
    )
    return table.chosen(np.arange(count) % 3 != 1), source, target


def test_copies_arrive_in_one_call_in_their_stream(operator: Operator) -> None:
    table, source, target = scattered(9)
    expected = np.zeros_like(target)
    for at, to, size in zip(table.sources, table.targets, table.row_bytes, strict=True):
        start, end = at - source.ctypes.data, to - target.ctypes.data
        expected[end : end + size] = source[start : start + size]
    CudaStream(STREAM).copy(table, source_is_stable=True)
    assert (target == expected).all()
    assert [stream for stream, _ in operator.calls] == [STREAM]


def test_only_a_stable_source_may_be_read_ahead_of_the_stream(operator: Operator) -> None:
    table, *_memory = scattered(3)
    for source_is_stable in (True, False):
        CudaStream(STREAM).copy(table, source_is_stable=source_is_stable)
    assert [any_order for _, any_order in operator.calls] == [True, False]
