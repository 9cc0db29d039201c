# SPDX-License-Identifier: Apache-2.0
"""Checks, before a device's KV cache is used, that what a transfer stores comes back from it, byte for byte.

It is for transfers that no test of ours has run on the real device. It cannot show that copies are in order with the
engine's own work.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping

import torch

from vllm_overlay.tiers.memory import Bytes, HostBuffer, HostPool, units_needed
from vllm_overlay.transfer.base import Handle, KVTransfer, Placement, Span
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_map import span_pieces

TIMEOUT_S = 30.0
"""The time limit of one copy of one block. The first one compiles nothing any more."""
_POLL_S = 0.001
_POISON = 0xA5
_WAY_OUT = "remove HybridOffloadConnector"


class TransferError(RuntimeError):
    """Copies to and from the device do not work. The message says which, and what to change."""


def check_round_trips(transfer: KVTransfer, groups: Mapping[int, GroupTensors], memory: Bytes | None) -> None:
    """Store the last block of each group, poison it, load it, and compare it and the block before it.

    Whole pages, and for groups that are cut a span at the block's start and one in the middle. What the blocks held is
    put back at the end. Called by the worker's half at start, while nobody uses the KV cache or ``memory``.

    Args:
        transfer: Has no copies under way.
        groups: What it was built from.
        memory: A pool that buffers will lie in, (units, bytes a unit). None, where the tier tells of none: it must not
            be said to be pinned then.

    Raises:
        TransferError: The device's buffer is too small for an object, or a copy failed, did not end, or brought other
            bytes.
    """
    for group_id, group in groups.items():
        # The bytes of each layer's last block and the one before it, if there is one.
        blocks = [layer[-2:].view(torch.uint8) for layer in group.layers]
        saved = [block.clone() for block in blocks]
        try:
            for placement, num_bytes in _placements(group_id, group):
                if (buffer := _buffer(memory, num_bytes)) is not None:
                    _check(transfer, group, blocks, placement, buffer)
        finally:
            with contextlib.suppress(RuntimeError):  # of a device that is lost: what was raised before says so
                for block, before in zip(blocks, saved, strict=True):
                    block.copy_(before)


def _placements(group_id: int, group: GroupTensors) -> Iterator[tuple[Placement, int]]:
    """The placements that are tried, each with its bytes."""
    last = group.num_blocks - 1
    yield Placement(pages=((group_id, last),)), group.page_bytes
    if group.page_map is not None:
        unit = group.page_map.token_unit
        middle = group.block_size // unit // 2 * unit
        for offset, num_tokens in ((0, unit), (middle, group.block_size - middle)):
            yield Placement(spans=(Span(group_id, last, offset, num_tokens),)), num_tokens * group.token_bytes


def _buffer(memory: Bytes | None, num_bytes: int) -> HostBuffer | None:
    """A buffer for one object. None: no object of that size can be stored."""
    if memory is None:
        return HostPool(1, num_bytes).buffer((0,), num_bytes)
    count = units_needed(num_bytes, memory.shape[1])
    return HostBuffer(memory, tuple(range(count)), num_bytes) if count <= memory.shape[0] else None


def _check(
    transfer: KVTransfer, group: GroupTensors, blocks: list[torch.Tensor], placement: Placement, buffer: HostBuffer
) -> None:
    for block in blocks:
        block.copy_(torch.randint_like(block, 256))
    stored = [block.clone() for block in blocks]
    handle = transfer.gather([placement], [buffer])
    if handle is None:
        raise TransferError(
            f"device_buffer_bytes cannot hold an object of {buffer.num_bytes} bytes: raise it to {2 * buffer.num_bytes}"
        )
    _wait(transfer, handle)
    for block in blocks:
        block[-1].fill_(_POISON)
    _wait(transfer, transfer.scatter([placement], [buffer]))
    for layer, block, before in zip(group.layers, blocks, stored, strict=True):
        loaded = block.clone()
        block.copy_(before)
        if placement.spans:
            _expect_span(group, layer, placement.spans[0])
        if not torch.equal(loaded, block):
            raise TransferError(f"{placement} came back with other bytes than were stored: {_WAY_OUT}")


def _expect_span(group: GroupTensors, layer: torch.Tensor, span: Span) -> None:
    """Poison the span's block, except for the span."""
    assert group.page_map is not None
    kept = [piece.clone() for part in group.page_map.parts(layer) for _, piece in span_pieces(part, span)]
    layer[span.block_id].view(torch.uint8).fill_(_POISON)
    pieces = (piece for part in group.page_map.parts(layer) for _, piece in span_pieces(part, span))
    for piece, before in zip(pieces, kept, strict=True):
        piece.copy_(before)


def _wait(transfer: KVTransfer, handle: Handle) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for finished in transfer.poll():
            if finished.handle == handle:
                if finished.error is not None:
                    raise TransferError(f"a copy failed ({finished.error!r}): {_WAY_OUT}") from finished.error
                return
        time.sleep(_POLL_S)
    raise TransferError(f"a copy of one block did not end in {TIMEOUT_S:.0f} s: {_WAY_OUT}")
