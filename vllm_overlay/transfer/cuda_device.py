# SPDX-License-Identifier: Apache-2.0
"""CUDA's streams and copies, for ``CudaTransfer``. Run on one GPU (docs/gpu.md). The tests have a fake of both classes.

All calls are from the thread in which torch has made the device current: the worker's main thread. Everything is
submitted, and nothing waits. Each call may raise when the device fails. The operations of a stream run one after the
other. The copies within one operation run in any order. Those of two streams run at any time, unless one waits for the
other's event.
"""

import numpy as np
import torch
from vllm import _custom_ops as vllm_ops

from vllm_overlay.transfer import copy_kernel
from vllm_overlay.transfer.copy_table import CopyTable


class CudaStream:
    """An order of operations."""

    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self._stream = stream

    def record(self) -> "torch.cuda.Event":
        """The point after what has been submitted."""
        return self._stream.record_event()

    def wait_for(self, event: "torch.cuda.Event") -> None:
        """What is submitted from now on runs after the event has passed."""
        self._stream.wait_event(event)

    def copy(self, table: CopyTable, *, source_is_stable: bool) -> None:
        """Copies of a single row each, by the copy engines. ``source_is_stable`` allows them to read at any time from
        now on, ahead of what the stream waits for.

        This is vLLM's own batch copy: one call of the driver since CUDA 12.8, else one for each copy.
        """
        fields = (table.sources, table.targets, table.row_bytes)
        sources, targets, sizes = (torch.from_numpy(np.ascontiguousarray(field)) for field in fields)
        with torch.cuda.stream(self._stream):
            vllm_ops.swap_blocks_batch(sources, targets, sizes, is_src_access_order_any=source_is_stable)

    def run(self, table: CopyTable, *, only_clear: bool = False) -> None:
        """Copies by one kernel, or writes zeros to the targets. It takes device memory and pinned host memory."""
        with torch.cuda.stream(self._stream):
            copy_kernel.copy_rows(self._upload(table), table.vector_bytes, table.largest_bytes, only_clear=only_clear)

    def _upload(self, table: CopyTable) -> torch.Tensor:
        """The table on the device, in the current stream's order.

        torch's allocators keep both memories until the stream is done with them. They ask the driver for more only for
        tables in flight that are more or larger than ever before. That may wait for the device.
        """
        pinned = torch.empty(table.fields.shape, dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = table.fields
        return pinned.to(self._stream.device, non_blocking=True)


class CudaDevice:
    """Compiles the kernel when it is made. That takes a few seconds unless Triton has it in its cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            copy_kernel.prepare(device)

    def compute_stream(self) -> CudaStream:
        """The stream that the engine computes in now. The next step may have another one."""
        return CudaStream(torch.cuda.current_stream(self._device))

    def new_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Bytes in device memory, at an address that is a multiple of 256."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
