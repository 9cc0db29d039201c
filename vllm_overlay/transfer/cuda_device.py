# SPDX-License-Identifier: Apache-2.0
"""CUDA's streams, events and copies behind ``device.py``. Run on one GPU (docs/gpu.md).

All calls are from the thread in which torch has made the device current: the worker's main thread.
"""

import numpy as np
import torch
from vllm import _custom_ops as vllm_ops

from vllm_overlay.transfer import copy_kernel
from vllm_overlay.transfer.copy_table import CopyTable
from vllm_overlay.transfer.device import Device, Event, Stream


class CudaEvent(Event):
    def __init__(self, event: "torch.cuda.Event") -> None:
        self.event = event

    def has_passed(self) -> bool:
        return bool(self.event.query())


class CudaStream(Stream):
    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self._stream = stream

    def record(self) -> CudaEvent:
        return CudaEvent(self._stream.record_event())

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def copy(self, table: CopyTable, *, source_is_stable: bool) -> None:
        """vLLM's own batch copy: one call of the driver since CUDA 12.8, else one for each copy."""
        fields = (table.sources, table.targets, table.row_bytes)
        sources, targets, sizes = (torch.from_numpy(np.ascontiguousarray(field)) for field in fields)
        with torch.cuda.stream(self._stream):
            vllm_ops.swap_blocks_batch(sources, targets, sizes, is_src_access_order_any=source_is_stable)

    def run(self, table: CopyTable) -> None:
        with torch.cuda.stream(self._stream):
            copy_kernel.copy_rows(self._upload(table), table.vector_bytes, table.largest_bytes)

    def clear(self, table: CopyTable) -> None:
        with torch.cuda.stream(self._stream):
            copy_kernel.clear_rows(self._upload(table), table.vector_bytes, table.largest_bytes)

    def _upload(self, table: CopyTable) -> torch.Tensor:
        """The table on the device, in the current stream's order.

        torch's allocators keep both memories until the stream is done with them. They ask the driver for more only for
        tables in flight that are more or larger than ever before. That may wait for the device.
        """
        pinned = torch.empty(table.fields.shape, dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = table.fields
        return pinned.to(self._stream.device, non_blocking=True)


class CudaDevice(Device):
    """Compiles the kernel when it is made. That takes a few seconds unless Triton has it in its cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            copy_kernel.prepare(device)

    def compute_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._device))

    def new_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
