# SPDX-License-Identifier: Apache-2.0
"""CpuTransfer moves the bytes that a naive loop moves, and no other, whatever the layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transfer import naive
from tests.transfer.copying import copied
from tests.transfer.naive import NUM_BLOCKS, Case, cases
from tests.transfer.objects import chunks, objects, spans
from vllm_overlay.tiers.memory import HostBuffer, HostPool, units_needed
from vllm_overlay.transfer import cpu_kernels
from vllm_overlay.transfer.base import Placement, Span
from vllm_overlay.transfer.cpu import CpuTransfer, _Part
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_map import known_page_maps

LAYOUTS = ["column_keys", "row_keys", "amx_tiles", "cells"]


def check_gather(case: Case, placements: list[Placement], buffers: list[HostBuffer], pool: HostPool) -> None:
    naive.randomize(case.groups, seed=3)
    before = naive.snapshot_of(case.groups)
    expected = pool.array.copy()
    for placement, buffer in zip(placements, buffers, strict=True):
        data = naive.gathered(case.groups, placement)
        for place, unit in enumerate(buffer.units):
            part = data[place * pool.unit_bytes :][: pool.unit_bytes]
            expected[unit, : part.size] = part
    copied(CpuTransfer(case.groups), "gather", placements, buffers)
    assert (pool.array == expected).all()
    assert all((a == b).all() for a, b in zip(before, naive.snapshot_of(case.groups), strict=True))


def check_scatter(case: Case, placements: list[Placement], buffers: list[HostBuffer], pool: HostPool) -> None:
    naive.randomize(case.groups, seed=4)
    for placement, buffer in zip(placements, buffers, strict=True):
        naive.scatter(case.groups, placement, naive.bytes_of(buffer))
    expected = naive.snapshot_of(case.groups)
    naive.randomize(case.groups, seed=4)
    before = pool.array.copy()
    copied(CpuTransfer(case.groups), "scatter", placements, buffers)
    assert all((a == b).all() for a, b in zip(expected, naive.snapshot_of(case.groups), strict=True))
    assert (pool.array == before).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_chunks_go_to_the_host_in_the_canonical_order_and_back_to_their_tokens_alone(
    layout: str, data: st.DataObject
) -> None:
    case = data.draw(cases(layout))
    moved = data.draw(chunks(case))
    check_gather(case, *moved)
    check_scatter(case, *moved)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_objects_of_pages_and_spans_go_to_the_host_and_back(data: st.DataObject) -> None:
    case = data.draw(cases())
    placement, buffer, pool = data.draw(objects(case))
    check_gather(case, [placement], [buffer], pool)
    check_scatter(case, [placement], [buffer], pool)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_zero_clears_a_span_and_nothing_else(data: st.DataObject) -> None:
    case = data.draw(cases())
    cleared = data.draw(st.lists(spans(case), max_size=3))
    naive.randomize(case.groups, seed=5)
    for span in cleared:
        for memory, indices in naive.pieces(case.groups, Placement(spans=(span,))):
            memory[indices] = 0
    expected = naive.snapshot_of(case.groups)
    naive.randomize(case.groups, seed=5)
    copied(CpuTransfer(case.groups), "scatter", [], [], cleared)
    assert all((a == b).all() for a, b in zip(expected, naive.snapshot_of(case.groups), strict=True))


def real_case(padding: int, layout: str = "column_keys") -> Case:
    """Qwen3.5-35B-A3B's attention but for the number of layers."""
    layers = tuple(naive.padded((2, 1056, 512), torch.bfloat16, padding) for _ in range(2))
    (page_map,) = [one for one in known_page_maps(1056, 256) if one.name == layout]
    return Case({0: GroupTensors(layers, page_map), 1: GroupTensors(layers)}, 48, 1056)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiled copies know they copy."""
    monkeypatch.delattr(_Part, "_copy_strided")


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("layout", ["column_keys", "amx_tiles"])
@pytest.mark.parametrize("padding", [0, 32, 8])
@pytest.mark.parametrize("first", [0, 1])
def test_a_real_geometry_is_moved_bit_for_bit(padding: int, first: int, layout: str) -> None:
    case = real_case(padding, layout)
    placements = [Placement(spans=(Span(0, block, at * 48, 48),)) for block in (2, 0) for at in range(first, 22)]
    num_bytes = 48 * case.attention.token_bytes
    pool = naive.random_pool(len(placements), num_bytes, seed=6)
    buffers = [pool.buffer([unit], num_bytes) for unit in range(len(placements))]
    check_gather(case, placements, buffers, pool)
    check_scatter(case, placements, buffers, pool)


def test_everything_is_compiled_by_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = [function for function in vars(cpu_kernels).values() if hasattr(function, "signatures")]
    compiled = [function for function in compiled if function.py_func.__name__[0] != "_"]
    cpu_kernels.prepare(has_tiles=True)
    for layout in ("column_keys", "amx_tiles"):
        test_a_real_geometry_is_moved_bit_for_bit(padding=0, first=0, layout=layout)
    test_a_snapshot_with_a_tail_is_moved_bit_for_bit()
    assert [len(function.signatures) for function in compiled] == [1] * 6
    calls: list[bool] = []
    monkeypatch.setattr(cpu_kernels, "prepare", calls.append)
    for layout in ("column_keys", "amx_tiles"):
        CpuTransfer(real_case(0, layout).groups)
    assert calls == [False, True]


def test_a_snapshot_with_a_tail_is_moved_bit_for_bit() -> None:
    case = real_case(0)
    placement = Placement(((1, 0), (1, 2)), (Span(0, 1, 96, 48),))
    num_bytes = naive.num_bytes_of(case.groups, placement)
    pool = naive.random_pool(units_needed(num_bytes, 1 << 20) + 1, 1 << 20, seed=8)
    buffer = pool.buffer([*range(2, pool.num_units), 0], num_bytes)
    check_gather(case, [placement], [buffer], pool)
    check_scatter(case, [placement], [buffer], pool)


@pytest.mark.parametrize("way", ["gather", "scatter"])
@pytest.mark.parametrize(
    ("placement", "relation"),
    [
        (Placement(((1, 0),), (Span(0, 1, 0, 48),)), "shorter"),
        (Placement(((1, 0),)), "longer"),
        (Placement(spans=(Span(0, 1, 0, 48), Span(0, 2, 0, 48))), "longer"),
    ],
)
def test_a_placement_of_another_size_than_its_buffer_is_refused(way: str, placement: Placement, relation: str) -> None:
    case = real_case(0)
    size = naive.num_bytes_of(case.groups, placement) + (1 if relation == "shorter" else -1)
    buffer = HostPool(2, size).buffer([0], size)
    with pytest.raises(ValueError, match=f"{relation} than its buffer"):
        copied(CpuTransfer(case.groups), way, [placement], [buffer])


@pytest.mark.parametrize("way", ["gather", "scatter"])
@pytest.mark.parametrize(
    "span", [Span(0, NUM_BLOCKS, 0, 48), Span(0, -1, 0, 48), Span(0, 0, 1056, 48), Span(0, 0, -48, 48)]
)
def test_tokens_that_are_not_there_are_refused(span: Span, way: str) -> None:
    case = real_case(0)
    num_bytes = 48 * case.attention.token_bytes
    buffer = HostPool(1, num_bytes).buffer([0], num_bytes)
    with pytest.raises(IndexError, match="blocks of 1056 tokens"):
        copied(CpuTransfer(case.groups), way, [Placement(spans=(span,))], [buffer])


@pytest.mark.parametrize("way", ["gather", "scatter"])
@pytest.mark.parametrize("padding", [0, 8])
@pytest.mark.parametrize(
    ("block_id", "unit", "words"),
    [
        (-1, 0, "block -1 is not among"),
        (NUM_BLOCKS, 0, f"block {NUM_BLOCKS} is not among"),
        (0, -1, "unit -1 is not in a pool of 1"),
        (0, 1, "unit 1 is not in a pool of 1"),
    ],
)
def test_pages_that_are_not_there_are_refused(block_id: int, unit: int, words: str, padding: int, way: str) -> None:
    case = real_case(padding)
    num_bytes = naive.num_bytes_of(case.groups, Placement(((1, 0),)))
    buffer = HostPool(1, num_bytes).buffer([unit], num_bytes)
    with pytest.raises(IndexError, match=words):
        copied(CpuTransfer(case.groups), way, [Placement(((1, block_id),))], [buffer])


@pytest.mark.parametrize(("unit", "missing_bytes"), [(1, 0), (-1, 0), (0, 1)])
def test_a_chunk_that_is_not_in_the_pool_is_refused(unit: int, missing_bytes: int) -> None:
    case = real_case(0)
    pool = HostPool(1, 48 * case.attention.token_bytes - missing_bytes)
    with pytest.raises(IndexError, match="are not in a pool"):
        copied(
            CpuTransfer(case.groups),
            "gather",
            [Placement(spans=(Span(0, 0, 0, 48),))],
            [pool.buffer([unit], pool.unit_bytes)],
        )
