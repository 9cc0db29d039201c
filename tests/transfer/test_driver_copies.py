# SPDX-License-Identifier: Apache-2.0
"""Copies reach the CUDA driver as its header declares them: a fake library, called through real C pointers."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from tests.transfer.fake_device import write
from vllm_overlay.transfer.copy_table import CopyTable
from vllm_overlay.transfer.driver_copies import DriverCopies

STREAM = 0x7F00DEADBEEF
BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_uint64,
)
SINGLE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64)
FIND = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p
)


class FakeDriver:
    """Its functions are C function pointers, as those of a library."""

    def __init__(self, *, has_batch: bool, refuses: int = -1) -> None:
        self.calls: list[str] = []
        self.access_orders: list[int] = []
        self._refuses = refuses
        self._batch = BATCH(self._copy_batch)
        self.cuGetProcAddress_v2 = FIND(self._find(has_batch))
        self.cuMemcpyAsync = SINGLE(self._copy)

    def _find(self, has_batch: bool) -> Callable[..., int]:
        def find(name: bytes, address: "ctypes._Pointer[ctypes.c_void_p]", version: int, flags: int, _: int) -> int:
            assert (name, version, flags) == (b"cuMemcpyBatchAsync", 12080, 0)
            address[0] = ctypes.cast(self._batch, ctypes.c_void_p).value if has_batch else None
            return 0 if has_batch else 500

        return find

    def _copy_batch(self, targets, sources, sizes, count, attributes, starts, num_attributes, failed, stream) -> int:
        assert (starts[0], num_attributes, stream) == (0, 1, STREAM)
        assert attributes[1:6] == [0] * 5
        self.access_orders.append(attributes[0])
        self.calls.append("batch")
        for place in range(count):
            if place == self._refuses:
                failed[0] = place
                return 1
            write(targets[place], ctypes.string_at(sources[place], sizes[place]))
        return 0

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        assert stream == STREAM
        if len(self.calls) == self._refuses:
            return 1
        self.calls.append("single")
        write(target, ctypes.string_at(source, size))
        return 0


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


def expected(table: CopyTable, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    found = np.zeros_like(target)
    for at, to, size in zip(table.sources, table.targets, table.row_bytes, strict=True):
        start, end = at - source.ctypes.data, to - target.ctypes.data
        found[end : end + size] = source[start : start + size]
    return found


@pytest.mark.parametrize("has_batch", [True, False])
def test_copies_arrive(has_batch: bool) -> None:
    driver = FakeDriver(has_batch=has_batch)
    table, source, target = scattered(9)
    copies, wanted = DriverCopies(driver), expected(table, source, target)
    copies.submit(table, STREAM, source_is_stable=True)
    assert (target == wanted).all()
    assert driver.calls == (["batch"] if has_batch else ["single"] * 6)
    copies.submit(CopyTable.of([]), STREAM, source_is_stable=True)
    assert len(driver.calls) == (1 if has_batch else 6)


def test_only_a_stable_source_may_be_read_ahead_of_the_stream() -> None:
    driver = FakeDriver(has_batch=True)
    table, *_memory = scattered(3)
    for source_is_stable in (True, False):
        DriverCopies(driver).submit(table, STREAM, source_is_stable=source_is_stable)
    assert driver.access_orders == [3, 1]


@pytest.mark.parametrize("has_batch", [True, False])
def test_a_refused_copy_is_named(has_batch: bool) -> None:
    driver = FakeDriver(has_batch=has_batch, refuses=2)
    table, *_memory = scattered(6)
    with pytest.raises(RuntimeError, match=r"cuMemcpy\w*Async: error 1 of the CUDA driver, copy 2"):
        DriverCopies(driver).submit(table, STREAM, source_is_stable=False)


def test_without_a_driver_there_is_an_error() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(OSError, match="libcuda"):
            DriverCopies()
    else:
        pytest.skip("this machine has a CUDA driver")
