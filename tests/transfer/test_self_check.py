# SPDX-License-Identifier: Apache-2.0
"""The check before a device's KV cache is used: sound transfers pass, each fault is named, nothing is left changed."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.transfer.fake_device import FakeDevice
from tests.transfer.layouts import KINDS, LAYOUTS, Kind, Layout, views
from vllm_overlay.tiers.memory import HostBuffer, HostPool
from vllm_overlay.transfer import self_check
from vllm_overlay.transfer.base import Handle, KVTransfer, Placement, Span
from vllm_overlay.transfer.cuda import CudaTransfer
from vllm_overlay.transfer.factory import build_transfer
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_map import CellMap
from vllm_overlay.transfer.self_check import TransferError, check_round_trips

CASES = [(kind, layout) for kind in KINDS for layout in LAYOUTS if layout.is_made_for(kind) and not layout.kernel_block]


class EagerDevice(FakeDevice):
    """Everything has run when somebody asks."""

    def check(self) -> None:
        super().check()
        self.run_all()


class Faulty(CudaTransfer):
    """``fault`` changes what a scatter is given."""

    fault: Callable[[Placement, HostBuffer], tuple[Placement, HostBuffer]] | None = None

    def scatter(
        self, placements: Sequence[Placement], buffers: Sequence[HostBuffer], zeros: Sequence[Span] = ()
    ) -> Handle:
        if self.fault is not None:
            pairs = [self.fault(*pair) for pair in zip(placements, buffers, strict=True)]
            placements, buffers = [placement for placement, _ in pairs], [buffer for _, buffer in pairs]
        return super().scatter(placements, buffers, zeros)


def made(kind: Kind, layout: Layout) -> tuple[dict[int, GroupTensors], HostPool]:
    groups = {3: GroupTensors(tuple(views(kind, layout)), CellMap())}
    return groups, HostPool(64, 4096)


def transfer_of(groups: dict[int, GroupTensors], **settings: Any) -> Faulty:
    return Faulty(groups, EagerDevice(), **{"ring_bytes": 1 << 20, **settings})


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=[f"{kind.name}, {layout}" for kind, layout in CASES])
def test_a_sound_transfer_passes_and_the_cache_is_as_before(kind: Kind, layout: Layout) -> None:
    groups, pool = made(kind, layout)
    before = [layer.clone() for layer in groups[3].layers]
    check_round_trips(transfer_of(groups), groups, pool.array)
    assert all(same_bytes(layer, was) for layer, was in zip(groups[3].layers, before, strict=True))


def one_block_lower(placement: Placement, buffer: HostBuffer) -> tuple[Placement, HostBuffer]:
    pages = tuple((group_id, block_id - 1) for group_id, block_id in placement.pages)
    return Placement(pages, placement.spans), buffer


def one_token_lower(placement: Placement, buffer: HostBuffer) -> tuple[Placement, HostBuffer]:
    moved = tuple(
        Span(span.group_id, span.block_id, max(0, span.offset - 1), span.num_tokens) for span in placement.spans
    )
    return Placement(placement.pages, moved), buffer


def one_bit_other(placement: Placement, buffer: HostBuffer) -> tuple[Placement, HostBuffer]:
    buffer.segments()[-1][-1] ^= 1
    return placement, buffer


@pytest.mark.parametrize("fault", [one_block_lower, one_token_lower, one_bit_other])
def test_other_bytes_are_noticed(fault: Any) -> None:
    groups, pool = made(*CASES[0])
    before = [layer.clone() for layer in groups[3].layers]
    transfer = transfer_of(groups)
    transfer.fault = fault
    with pytest.raises(TransferError, match="came back with other bytes"):
        check_round_trips(transfer, groups, pool.array)
    assert all(same_bytes(layer, was) for layer, was in zip(groups[3].layers, before, strict=True))


def test_a_lost_device_a_copy_that_does_not_end_and_a_small_buffer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, pool = made(*CASES[0])
    lost = EagerDevice()
    transfer: KVTransfer = CudaTransfer(groups, lost, ring_bytes=1 << 20)
    lost.lose()
    with pytest.raises(TransferError, match="illegal memory access"):
        check_round_trips(transfer, groups, pool.array)
    with pytest.raises(TransferError, match=r"device_buffer_bytes cannot hold an object of .*: raise it to"):
        check_round_trips(transfer_of(groups, ring_bytes=4096), groups, pool.array)
    monkeypatch.setattr(self_check, "TIMEOUT_S", 0.05)
    with pytest.raises(TransferError, match="did not end"):
        check_round_trips(CudaTransfer(groups, FakeDevice(), ring_bytes=1 << 20), groups, pool.array)


def test_a_tier_that_tells_of_no_memory_is_checked_in_memory_of_its_own() -> None:
    groups, _ = made(*CASES[0])
    transfer = transfer_of(groups, host_is_pinned=False)
    check_round_trips(transfer, groups, None)
    transfer.fault = one_bit_other
    with pytest.raises(TransferError, match="came back with other bytes"):
        check_round_trips(transfer, groups, None)


def test_a_pool_that_serves_already_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that comes back has its transfer built anew, while others load into the blocks."""
    checks: list[int] = []
    monkeypatch.setattr(self_check, "check_round_trips", lambda transfer, groups, memory: checks.append(len(memory)))
    for name in ("cuda.CudaTransfer", "cuda_device.CudaDevice", "pinned.PinnedMemory"):
        monkeypatch.setattr(f"vllm_overlay.transfer.{name}", Mock())
    groups = {0: GroupTensors((torch.empty(2, 1, 4, 8, device="meta"),))}
    for num_units in (2, 2, 3, 2):
        build_transfer(groups, [HostPool(num_units, 4096).array], 1 << 20)
    assert checks == [2, 3]
