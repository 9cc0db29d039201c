# SPDX-License-Identifier: Apache-2.0
"""Transfers for KV tensors in the memory of a CUDA device. Tested on a fake device, and run on one GPU (docs/gpu.md).

*Stores*: one kernel on the compute stream copies the pages into a buffer on the device, the ring. What the engine
computes afterwards into the same blocks cannot touch that. Then a side stream copies from the ring to pinned host
memory, in pieces, so that the engine's own small copies to the host get their turn.

*Loads*: the copy engines write from pinned host memory into the pages, on a stream that waits for all that the engine
had submitted before. The kernel takes only what copy engines are slow at: short pieces, and pages whose order in
memory is not that of the object. Then the same stream clears what a load leaves beyond its last token.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.tiers.memory import HostBuffer
from vllm_overlay.transfer.base import FinishedCopy, Handle, KVTransfer, Placement, Span, error_of
from vllm_overlay.transfer.descriptors import Descriptors
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.host_units import HostUnits
from vllm_overlay.transfer.regions import Regions

if TYPE_CHECKING:
    import torch

    from vllm_overlay.transfer.cuda_device import CudaDevice, CudaStream

RING_BYTES = 512 << 20
MAX_COPY_BYTES = 4 << 20
"""Largest single copy of a copy engine. Another stream's copy may have to wait for it, about 0.1 ms over PCIe 5."""
MIN_ENGINE_BYTES = 28 << 10
"""The kernel reads shorter pieces. Copy engines reach 7 GB/s with 16 KiB, and 27 to 44 with 28 KiB (vLLM PR 42212)."""
_ALIGNMENT = 256
_CLOSE_INTERVAL_S = 0.001


@dataclass(frozen=True, slots=True)
class _Running:
    """A submitted copy. It has ended when the event has passed, and failed if there is an error."""

    event: "torch.cuda.Event"
    region: int | None
    error: BaseException | None


class CudaTransfer(KVTransfer):
    """One worker's copies.

    A device error that comes from the streams or events themselves (a "sticky" one) ends everything: nothing runs in
    that CUDA context any more. What was submitted has then failed; gathers find no room; scatters fail.

    Args:
        groups: By group id; tensors in the device's memory.
        device: Where they are.
        ring_bytes: Of device memory for stores on their way. An object that is larger is never stored.
        host_is_pinned: Whether the kernel can read the buffers of scatters. If not, the copy engines take every row.
        release_host: Called by ``close`` once nothing touches host memory any more.
        max_copy_bytes: See ``MAX_COPY_BYTES``.
        min_engine_bytes: See ``MIN_ENGINE_BYTES``.
    """

    def __init__(
        self,
        groups: Mapping[int, GroupTensors],
        device: "CudaDevice",
        *,
        ring_bytes: int = RING_BYTES,
        host_is_pinned: bool = True,
        release_host: Callable[[], None] | None = None,
        max_copy_bytes: int = MAX_COPY_BYTES,
        min_engine_bytes: int = MIN_ENGINE_BYTES,
    ) -> None:
        self._device = device
        self._descriptors = Descriptors(groups)
        self._host_is_pinned = host_is_pinned
        self._release_host = release_host
        self._max_copy_bytes = max_copy_bytes
        self._min_engine_bytes = min_engine_bytes
        self._ring = device.allocate(ring_bytes)
        self._regions = Regions(ring_bytes)
        self._store_stream, self._load_stream = device.new_stream(), device.new_stream()
        self._handles = itertools.count(1)
        self._running: dict[Handle, _Running] = {}
        self._finished: list[FinishedCopy] = []
        self._device_error: BaseException | None = None

    @property
    def num_free(self) -> int:
        """Bytes of the ring that no store has."""
        return self._regions.num_free

    def gather(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer]) -> Handle | None:
        units = sum(len(buffer.units) * buffer.array.shape[1] for buffer in buffers)
        region = None if self._device_error else self._regions.allocate(-(-units // _ALIGNMENT) * _ALIGNMENT)
        if region is None:
            return None
        ring = self._ring.data_ptr() + region
        return self._submit(partial(self._store, placements, buffers, ring), self._store_stream, region)

    def scatter(
        self, placements: Sequence[Placement], buffers: Sequence[HostBuffer], zeros: Sequence[Span] = ()
    ) -> Handle:
        return self._submit(partial(self._load, placements, buffers, zeros), self._load_stream)

    def poll(self) -> list[FinishedCopy]:
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def close(self, timeout_s: float) -> bool:
        """See the base class. If it returns False, host memory must stay where it is: copies may still write to it."""
        deadline = time.monotonic() + timeout_s
        self._collect()
        while self._running and time.monotonic() < deadline:
            time.sleep(_CLOSE_INTERVAL_S)
            self._collect()
        if self._running:
            return False
        if self._release_host is not None:
            self._release_host()
        return True

    def _store(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer], ring: int) -> None:
        """Stores by way of a region that begins at ``ring``. The objects lie there unit by unit, as in host memory."""
        units = HostUnits.of(buffers)
        pages = self._descriptors.to_units(placements, units).moved(0, ring)
        rows = units.located(units.in_order()).moved(ring, 0)
        compute = self._device.compute_stream()
        compute.run(pages)
        self._store_stream.wait_for(compute.record())
        self._store_stream.copy(rows.in_pieces(self._max_copy_bytes), source_is_stable=False)

    def _load(self, placements: Sequence[Placement], buffers: Sequence[HostBuffer], zeros: Sequence[Span]) -> None:
        units = HostUnits.of(buffers)
        table = units.located(self._descriptors.to_units(placements, units)).reversed()
        cleared = self._descriptors.of_spans(zeros).reversed()
        if not self._host_is_pinned:
            table = table.in_rows()
        by_engine = (table.rows == 1) & (table.row_bytes >= (self._min_engine_bytes if self._host_is_pinned else 0))
        stream = self._load_stream
        stream.wait_for(self._device.compute_stream().record())
        if by_engine.any():
            stream.copy(table.chosen(by_engine).in_pieces(self._max_copy_bytes), source_is_stable=True)
        if not by_engine.all():
            stream.run(table.chosen(~by_engine))
        if len(cleared):
            stream.run(cleared, only_clear=True)

    def _submit(self, copy: Callable[[], None], stream: "CudaStream", region: int | None = None) -> Handle:
        """The copy ends when ``stream`` has done what it has now. After an error that includes what was submitted
        before it."""
        handle = Handle(next(self._handles))
        error = self._device_error or error_of(copy)
        try:
            if error is not None:
                stream.wait_for(self._device.compute_stream().record())
            self._running[handle] = _Running(stream.record(), region, error)
        except SHUTDOWN:
            raise
        except BaseException as device_error:
            self._lose_device(device_error)
            self._finished.append(FinishedCopy(handle, error or device_error))
        return handle

    def _collect(self) -> None:
        """Move what has ended to ``_finished``, in any order."""
        try:
            ended = [handle for handle, copy in self._running.items() if copy.event.query()]
        except SHUTDOWN:
            raise
        except BaseException as error:
            self._lose_device(error)
            return
        for handle in ended:
            copy = self._running.pop(handle)
            if copy.region is not None:
                self._regions.free(copy.region)
            self._finished.append(FinishedCopy(handle, copy.error))

    def _lose_device(self, error: BaseException) -> None:
        """Nothing runs there any more: all copies under way have failed."""
        self._device_error = error
        self._finished += [FinishedCopy(handle, copy.error or error) for handle, copy in self._running.items()]
        self._running.clear()
