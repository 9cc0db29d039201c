# SPDX-License-Identifier: Apache-2.0
"""The transfer for where the KV cache is."""

from collections.abc import Mapping, Sequence

from vllm_overlay.tiers.memory import Bytes
from vllm_overlay.transfer.base import KVTransfer
from vllm_overlay.transfer.group_tensors import GroupTensors

_checked: set[tuple[object, ...]] = set()
"""KV caches with host memory, whose copies this process has checked. A connector that comes back finds its KV cache in
use: the check would undo what others load into its blocks."""


def build_transfer(
    groups: Mapping[int, GroupTensors], host_memory: Sequence[Bytes], device_buffer_bytes: int
) -> KVTransfer:
    """Called by the worker's half, at start and when its connector comes back.

    Args:
        groups: By group id, all on one device.
        host_memory: The pools that buffers lie in; what a tier does not tell of is copied more slowly.
        device_buffer_bytes: For stores on their way, where the KV cache is not in host memory.

    Raises:
        OSError: A CUDA device without a CUDA driver.
        TransferError: Copies on this device do not bring back what was stored.
    """
    device = next(iter(groups.values())).layers[0].device
    if device.type == "cpu":
        from vllm_overlay.transfer.cpu import CpuTransfer

        return CpuTransfer(groups)
    from vllm_overlay.transfer.cuda import CudaTransfer
    from vllm_overlay.transfer.cuda_device import CudaDevice
    from vllm_overlay.transfer.pinned import PinnedMemory
    from vllm_overlay.transfer.self_check import check_round_trips

    pools = [PinnedMemory(array) for array in host_memory]

    def release_host() -> None:
        for pool in pools:
            pool.unregister()

    transfer = CudaTransfer(
        groups,
        CudaDevice(device),
        ring_bytes=device_buffer_bytes,
        host_is_pinned=bool(pools) and all(pool.is_pinned for pool in pools),
        release_host=release_host,
    )
    layers = [layer for group in groups.values() for layer in group.layers]
    places = [(layer.data_ptr(), layer.dtype, layer.shape, layer.stride()) for layer in layers]
    setup = (*places, *[array.shape for array in host_memory], device_buffer_bytes)
    if setup not in _checked:
        check_round_trips(transfer, groups, host_memory[0] if host_memory else None)
        _checked.add(setup)
    return transfer
