# SPDX-License-Identifier: Apache-2.0
"""The copy kernel in Triton's interpreter. test_copy_kernel.py runs this in a process with TRITON_INTERPRET=1."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import gpu_workloads
from bench.gpu_case import Case, Rig
from tests.transfer import naive
from tests.transfer.execution import clear, execute
from tests.transfer.fake_device import FakeDevice, FakeStream
from tests.transfer.naive import cases
from tests.transfer.objects import chunks
from vllm_overlay.transfer import copy_kernel
from vllm_overlay.transfer.copy_table import CopyTable
from vllm_overlay.transfer.descriptors import Descriptors
from vllm_overlay.transfer.host_units import HostUnits

MEMORY_BYTES = 1 << 17


def launch(table: CopyTable, *, only_clear: bool = False) -> None:
    fields = torch.tensor(table.fields).contiguous()
    copy_kernel.copy_rows(fields, table.vector_bytes, table.largest_bytes, only_clear=only_clear)


@st.composite
def tables(draw: st.DrawFn) -> CopyTable:
    """Copies of offsets, aligned to anything from 1 to 32 bytes; the targets do not overlap."""
    width = draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    copies, end = [], 0
    for _ in range(draw(st.integers(1, 4))):
        rows, row = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 3, 7, 16, 130]))
        source_step, gap = draw(st.integers(0, 9)), draw(st.integers(0, 3))
        source = draw(st.integers(0, 200))
        target = end + gap
        copies.append([width * n for n in (source, target, 1, row, source_step, row + gap)])
        copies[-1][2] = rows
        end = target + rows * (row + gap)
    return CopyTable.of([tuple(copy) for copy in copies])  # type: ignore[misc]


def memory(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-(1 << 62), 1 << 62, (2 * MEMORY_BYTES // 16, 2), generator=generator).view(torch.uint8)
    raw = raw.flatten()
    return raw[-raw.data_ptr() % 32 :][:MEMORY_BYTES]


@settings(deadline=None, max_examples=150)
@given(table=tables(), only_clear=st.booleans())
def test_the_kernel_moves_what_a_loop_moves(table: CopyTable, only_clear: bool) -> None:
    source, target = memory(1), memory(2)
    expected = target.clone()
    addresses = table.moved(source.data_ptr(), target.data_ptr())
    launch(addresses, only_clear=only_clear)
    moved, target = target.clone(), target.copy_(expected)
    (clear if only_clear else execute)(addresses)
    assert torch.equal(moved, target)
    assert torch.equal(source, memory(1))


def test_copies_larger_than_all_programs_take_at_once() -> None:
    num_bytes = 3 * copy_kernel.LANES * 16 + 48
    source = torch.arange(2 * num_bytes, dtype=torch.int32).view(torch.uint8)
    source = source[-source.data_ptr() % 16 :]
    target = torch.zeros(2 * num_bytes, dtype=torch.uint8)
    target = target[-target.data_ptr() % 16 :]
    for shift in (0, 4):
        copy = (source.data_ptr() + shift, target.data_ptr(), 1, num_bytes, num_bytes, num_bytes)
        launch(CopyTable.of([copy]))
        assert torch.equal(target[:num_bytes], source[shift : shift + num_bytes])
        assert not target[num_bytes:].any()


def test_all_variants_are_prepared_without_a_copy() -> None:
    """The table that copies nothing has null addresses."""
    copy_kernel.prepare(torch.device("cpu"))


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_chunks_of_any_layout_there_and_back(data: st.DataObject) -> None:
    case = data.draw(cases("cells"))
    placements, buffers, _ = data.draw(chunks(case))
    units = HostUnits.of(buffers)
    table = units.located(Descriptors(case.groups).to_units(placements, units))
    naive.randomize(case.groups, seed=3)
    launch(table)
    for placement, buffer in zip(placements, buffers, strict=True):
        assert (naive.bytes_of(buffer) == naive.gathered(case.groups, placement)).all()
    naive.randomize(case.groups, seed=4)
    for placement, buffer in zip(placements, buffers, strict=True):
        naive.scatter(case.groups, placement, naive.bytes_of(buffer))
    expected = naive.snapshot_of(case.groups)
    naive.randomize(case.groups, seed=4)
    launch(table.reversed())
    assert all((a == b).all() for a, b in zip(expected, naive.snapshot_of(case.groups), strict=True))


class KernelStream(FakeStream):
    """Its kernels are the real one, interpreted."""

    def run(self, table: CopyTable, *, only_clear: bool = False) -> None:
        self.submit(partial(launch, table, only_clear=only_clear))


class KernelDevice(FakeDevice):
    def __init__(self) -> None:
        super().__init__()
        self.streams = [KernelStream(self)]

    def new_stream(self) -> FakeStream:
        self.streams.append(KernelStream(self))
        return self.streams[-1]


@pytest.mark.parametrize("layout", gpu_workloads.LAYOUTS)
def test_the_whole_engine_with_the_real_kernel(layout: str) -> None:
    model = gpu_workloads.Model("hybrid", 32, layers=2, heads=2, cell_bytes=80, state_layers=2, state_bytes=4_004)
    for workload in (gpu_workloads.chunks(model, 16, 4), gpu_workloads.snapshots(model, 4)):
        device = KernelDevice()
        rig = Rig(device, torch.device("cpu"), device.run_all, device.run_all, lambda _: lambda: None)
        assert Case(rig, model, layout, workload, 4).is_right()
