# SPDX-License-Identifier: Apache-2.0
"""A table of copies moves the bytes that CpuTransfer moves, and no other, in every layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transfer import naive
from tests.transfer.copying import copied
from tests.transfer.execution import clear, execute
from tests.transfer.layouts import BLOCK, KINDS, LAYOUTS, NUM_BLOCKS, NUM_LAYERS, Kind, Layout, each_case, registered
from tests.transfer.naive import Case, cases
from tests.transfer.objects import chunks, objects, spans
from vllm_overlay.tiers.memory import HostBuffer, HostPool, units_needed
from vllm_overlay.transfer.base import Placement, Span
from vllm_overlay.transfer.copy_table import CopyTable
from vllm_overlay.transfer.cpu import CpuTransfer
from vllm_overlay.transfer.descriptors import Descriptors
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.host_units import HostUnits
from vllm_overlay.transfer.page_map import CellMap


def to_host(groups: dict[int, GroupTensors], placements: list[Placement], buffers: list[HostBuffer]) -> CopyTable:
    """From the KV cache to the rows of the buffers."""
    units = HostUnits.of(buffers)
    return units.located(Descriptors(groups).to_units(placements, units))


def in_one_unit(groups: dict[int, GroupTensors], placement: Placement) -> CopyTable:
    """From the KV cache to offsets in an object."""
    size = naive.num_bytes_of(groups, placement)
    return Descriptors(groups).to_units([placement], HostUnits.of([HostPool(1, size).buffer([0], size)]))


def check_both_ways(
    groups: dict[int, GroupTensors], placements: list[Placement], buffers: list[HostBuffer], pool: HostPool
) -> None:
    """Against CpuTransfer: all bytes of the pool after a store, all bytes of the KV cache after a load."""
    table = to_host(groups, placements, buffers)
    check_rows(table, buffers, pool.unit_bytes)
    naive.randomize(groups, seed=3)
    before, empty = naive.snapshot_of(groups), pool.array.copy()
    copied(CpuTransfer(groups), "gather", placements, buffers)
    expected = pool.array.copy()
    pool.array[:] = empty
    execute(table)
    assert (pool.array == expected).all()
    assert all((a == b).all() for a, b in zip(before, naive.snapshot_of(groups), strict=True))
    naive.randomize(groups, seed=4)
    copied(CpuTransfer(groups), "scatter", placements, buffers)
    loaded = naive.snapshot_of(groups)
    naive.randomize(groups, seed=4)
    execute(table.reversed())
    assert all((a == b).all() for a, b in zip(loaded, naive.snapshot_of(groups), strict=True))
    assert (pool.array == expected).all()


def check_rows(table: CopyTable, buffers: list[HostBuffer], unit_bytes: int) -> None:
    """All of the objects' bytes, none twice, no row beyond the end of a unit."""
    assert table.num_bytes == sum(buffer.num_bytes for buffer in buffers)
    rows = table.in_rows()
    offsets = rows.targets - buffers[0].array.ctypes.data
    assert (offsets // unit_bytes == (offsets + rows.row_bytes - 1) // unit_bytes).all()


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_chunks_of_any_layout(data: st.DataObject) -> None:
    case = data.draw(cases())
    check_both_ways(case.groups, *data.draw(chunks(case)))


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_objects_of_pages_and_spans_over_several_units(data: st.DataObject) -> None:
    case = data.draw(cases())
    placement, buffer, pool = data.draw(objects(case))
    if placement != Placement():
        check_both_ways(case.groups, [placement], [buffer], pool)


@each_case
def test_the_layouts_of_vllm(kind: Kind, layout: Layout) -> None:
    """Whole pages, tokens across kernel blocks, one token; in one unit and cut at any byte."""
    group = registered(kind, layout)
    placements = [
        Placement(spans=(Span(0, 1, 0, BLOCK),)),
        Placement(spans=(Span(0, 3, 5, 30), Span(0, 0, BLOCK - 1, 1))),
        Placement(((0, 2),), (Span(0, 4, 16, 16),)),
    ]
    sizes = [naive.num_bytes_of({0: group}, placement) for placement in placements]
    for unit_bytes in (max(sizes), 1000):
        counts = [units_needed(size, unit_bytes) for size in sizes]
        pool = naive.random_pool(sum(counts), unit_bytes, seed=1)
        units = iter(range(pool.num_units - 1, -1, -1))
        buffers = [
            pool.buffer([next(units) for _ in range(count)], size) for count, size in zip(counts, sizes, strict=True)
        ]
        check_both_ways({0: group}, placements, buffers, pool)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_clearing_spans_clears_them_alone(data: st.DataObject) -> None:
    case = data.draw(cases())
    cleared = data.draw(st.lists(spans(case), max_size=3))
    naive.randomize(case.groups, seed=5)
    copied(CpuTransfer(case.groups), "scatter", [], [], cleared)
    expected = naive.snapshot_of(case.groups)
    naive.randomize(case.groups, seed=5)
    clear(Descriptors(case.groups).of_spans(cleared).reversed())
    assert all((a == b).all() for a, b in zip(expected, naive.snapshot_of(case.groups), strict=True))


PIECES = {"LBNHC": (1, 1), "LBHNC": (2, 16), "BLNHC": (1, 1), "BLHNC": (2, 16), "LHBNC": (2, 16)}
"""Copies of a layer for 16 tokens, and rows of each."""


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.kernel_block is None], ids=str)
def test_as_few_copies_as_the_layout_allows(layout: Layout) -> None:
    group = registered(KINDS[0], layout)
    table = in_one_unit({0: group}, Placement(spans=(Span(0, 1, 16, 16),)))
    if layout.order.name in PIECES:
        copies, rows = PIECES[layout.order.name]
        assert (len(table), set(table.rows.tolist())) == (NUM_LAYERS * copies, {rows})
    assert table.num_bytes == 16 * group.token_bytes


def test_layers_that_follow_each_other_are_one_copy() -> None:
    """A block of BLNHC has all of its layers side by side."""
    (layout,) = [layout for layout in LAYOUTS if str(layout) == "BLNHC"]
    group = registered(KINDS[0], layout)
    table = in_one_unit({0: group}, Placement(spans=(Span(0, 3, 0, BLOCK),)))
    assert (len(table), table.row_bytes.tolist()) == (1, [group.page_bytes])


def test_a_pattern_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small_case()
    descriptors = Descriptors(case.groups)
    placements = [Placement(((1, block),), (Span(0, block, 0, 4),)) for block in range(4)]
    size = naive.num_bytes_of(case.groups, placements[0])
    pool = HostPool(4, size)
    units = HostUnits.of([pool.buffer([unit], size) for unit in range(4)])
    first = descriptors.to_units(placements, units)
    monkeypatch.setattr("vllm_overlay.transfer.descriptors._rows_of", None)
    assert (descriptors.to_units(placements, units).fields == first.fields).all()


def small_case() -> Case:
    layers = tuple(naive.padded((2, 16, 8), torch.bfloat16, 0) for _ in range(2))
    states = (naive.padded((3,), torch.float32, 1),)
    return Case({0: GroupTensors(layers, CellMap()), 1: GroupTensors(states)}, 1, 16)


@pytest.mark.parametrize(
    "placement",
    [
        Placement(spans=(Span(0, NUM_BLOCKS, 0, 1),)),
        Placement(spans=(Span(0, -1, 0, 1),)),
        Placement(spans=(Span(0, 0, 16, 1),)),
        Placement(spans=(Span(0, 0, 15, 2),)),
        Placement(spans=(Span(0, 0, -1, 2),)),
        Placement(spans=(Span(0, 0, 0, 0),)),
        Placement(spans=(Span(1, 0, 0, 1),)),
        Placement(((1, NUM_BLOCKS),)),
        Placement(((1, -1),)),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused(placement: Placement) -> None:
    with pytest.raises(IndexError):
        Descriptors(small_case().groups).to_units([placement], HostUnits.of([HostPool(1, 1).buffer([0], 1)]))


@pytest.mark.parametrize(("missing", "relation"), [(1, "longer"), (-1, "shorter")])
def test_a_buffer_of_another_size_is_refused(missing: int, relation: str) -> None:
    case = small_case()
    placement = Placement(spans=(Span(0, 0, 0, 4),))
    size = 4 * case.attention.token_bytes
    pool = HostPool(1, size + 1)
    with pytest.raises(ValueError, match=f"{relation} than its buffer"):
        to_host(case.groups, [placement], [pool.buffer([0], size - missing)])


@pytest.mark.parametrize(("units", "error"), [([0], ValueError), ([0, 2], IndexError), ([-1, 0], IndexError)])
def test_units_that_do_not_hold_the_object_are_refused(units: list[int], error: type[Exception]) -> None:
    case = small_case()
    size = 4 * case.attention.token_bytes
    pool = HostPool(2, size // 2)
    with pytest.raises(error):
        to_host(case.groups, [Placement(spans=(Span(0, 0, 0, 4),))], [pool.buffer(units, size)])


def test_pools_of_different_units_are_not_mixed() -> None:
    with pytest.raises(ValueError, match=r"units of \[8, 16\] bytes"):
        HostUnits.of([HostPool(1, size).buffer([0], 8) for size in (16, 8)])


def test_buffers_of_several_pools_with_equal_units_may_be_mixed() -> None:
    case = small_case()
    naive.randomize(case.groups, seed=6)
    placements = [Placement(spans=(Span(0, block, 0, 4),)) for block in range(2)]
    size = 4 * case.attention.token_bytes
    buffers = [HostPool(3, size).buffer([unit], size) for unit in (2, 1)]
    execute(to_host(case.groups, placements, buffers))
    for placement, buffer in zip(placements, buffers, strict=True):
        assert (naive.bytes_of(buffer) == naive.gathered(case.groups, placement)).all()
