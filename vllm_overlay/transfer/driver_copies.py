# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver's copies, called by address: cuMemcpyBatchAsync, or cuMemcpyAsync one by one where it is missing.

They go through the driver's own library, so neither vLLM's operators nor another package is needed. Signatures and
constants are of the CUDA Driver API, "Memory Management", as of 12.8. Tested on a fake of the library, never on a GPU.
"""

import ctypes
from functools import cached_property
from typing import Any

import numpy as np

from vllm_overlay.transfer.copy_table import CopyTable

_LIBRARY = "libcuda.so.1"
_BATCH_SINCE = 12080
"""CUDA 12.8 has the form of the function that is called here. Later versions keep it under this number."""
_IN_STREAM_ORDER, _IN_ANY_ORDER = 1, 3
"""CUmemcpySrcAccessOrder: when the source may be read."""


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. Zeros say nothing about where source and target are."""

    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_location", _Location),
        ("target_location", _Location),
        ("flags", ctypes.c_uint),
    )


_Batch = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # targets
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # how many
    ctypes.POINTER(_Attributes),
    ctypes.POINTER(ctypes.c_size_t),  # from which copy on each of the attributes holds
    ctypes.c_size_t,  # how many attributes
    ctypes.POINTER(ctypes.c_size_t),  # out: the copy that failed
    ctypes.c_void_p,  # stream
)


def open_driver() -> ctypes.CDLL:
    """The CUDA driver's library. Raises OSError when there is none."""
    return ctypes.CDLL(_LIBRARY)


class DriverCopies:
    """``library`` stands for the driver's in tests. Raises OSError when there is no driver."""

    def __init__(self, library: Any = None) -> None:
        self._library = library if library is not None else open_driver()

    def submit(self, table: CopyTable, stream: int, *, source_is_stable: bool) -> None:
        """Submit copies of a single row each to a stream that is not the default one.

        Raises RuntimeError with the driver's number when a copy is refused; those before it may have been submitted.
        """
        if len(table) == 0:
            return
        if self._batch is None:
            self._submit_one_by_one(table, stream)
        else:
            self._submit_batch(table, stream, _IN_ANY_ORDER if source_is_stable else _IN_STREAM_ORDER)

    def _submit_batch(self, table: CopyTable, stream: int, access_order: int) -> None:
        targets, sources, sizes = map(np.ascontiguousarray, (table.targets, table.sources, table.row_bytes))
        failed = ctypes.c_size_t(0)
        result = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            len(table),
            ctypes.byref(_Attributes(source_access_order=access_order)),
            ctypes.byref(ctypes.c_size_t(0)),
            1,
            ctypes.byref(failed),
            stream,
        )
        if result:
            raise RuntimeError(f"cuMemcpyBatchAsync: error {result} of the CUDA driver, copy {failed.value}")

    def _submit_one_by_one(self, table: CopyTable, stream: int) -> None:
        copy = self._library.cuMemcpyAsync
        copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        rows = zip(table.targets.tolist(), table.sources.tolist(), table.row_bytes.tolist(), strict=True)
        for place, (target, source, size) in enumerate(rows):
            if result := copy(target, source, size, stream):
                raise RuntimeError(f"cuMemcpyAsync: error {result} of the CUDA driver, copy {place}")

    @cached_property
    def _batch(self) -> Any:
        """The driver's function, or None."""
        find = self._library.cuGetProcAddress_v2
        find.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)
        address, status = ctypes.c_void_p(), ctypes.c_int()
        result = find(b"cuMemcpyBatchAsync", ctypes.byref(address), _BATCH_SINCE, 0, ctypes.byref(status))
        return _Batch(address.value) if result == 0 and address.value else None
