# SPDX-License-Identifier: Apache-2.0
"""Where objects lie, from a request's block tables."""

import pytest

from vllm_overlay.connector.placement import Placer, block_at
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.transfer.base import Placement, Span

FULL = Group(0, GroupKind.FULL, 64, 8, 512, True)
WINDOW = Group(1, GroupKind.WINDOW, 32, 8, 256, True, window=64)
STATE = Group(2, GroupKind.RECURRENT, 64, 0, 1000, False)
WHOLE = Group(3, GroupKind.FULL, 128, 0, 999, False)
KEYS = [bytes([n]) * 32 for n in range(1, 33)]
TABLE = [[11, 12, 13, 14], [21, 22, 23, 24, 25, 26], [31, 32, 33], [41, 42]]


def made(*groups: Group, chunk_size: int = 16) -> tuple[Placer, HybridOffloadPlanner]:
    geometry = Geometry.build(groups, 16, chunk_size)
    return Placer(geometry), HybridOffloadPlanner(geometry)


def test_a_chunk_is_a_part_of_one_block() -> None:
    placer, planner = made(FULL, WINDOW, STATE)
    assert placer.to_load([planner.chunk(KEYS, FULL, 5)], TABLE) == [Placement(spans=(Span(0, 12, 16, 16),))]
    assert placer.to_load([planner.chunk(KEYS, WINDOW, 5)], TABLE) == [Placement(spans=(Span(1, 23, 16, 16),))]


def test_a_group_that_cannot_be_cut_moves_whole_pages() -> None:
    placer, planner = made(WHOLE)
    assert placer.to_load([planner.chunk(KEYS, WHOLE, 1)], [[], [], [], [41, 42]]) == [Placement(pages=((3, 42),))]


@pytest.mark.parametrize(("boundary", "state_block"), [(16, 31), (64, 31), (80, 32), (128, 32)])
def test_a_snapshot_is_loaded_into_the_block_that_its_boundary_ends_in(boundary: int, state_block: int) -> None:
    placer, planner = made(FULL, STATE)
    snapshot = planner.snapshot(KEYS, boundary)
    (placement,) = placer.to_load([snapshot], TABLE)
    assert placement.pages == ((2, state_block),)


def test_a_snapshot_is_stored_from_the_blocks_that_are_offered() -> None:
    placer, planner = made(FULL, STATE)
    assert placer.to_store([planner.snapshot(KEYS, 64)], TABLE, {2: 99}) == [Placement(pages=((2, 99),))]


def test_a_snapshot_brings_the_tokens_since_the_last_chunk_of_every_group_that_can_be_cut() -> None:
    placer, planner = made(FULL, WINDOW, STATE, chunk_size=32)
    assert placer.to_load([planner.snapshot(KEYS, 80)], TABLE) == [
        Placement(pages=((2, 32),), spans=(Span(0, 12, 0, 16), Span(1, 23, 0, 16)))
    ]


@pytest.mark.parametrize("table", [[[0, 12], [21, 22], [31]], [[], [21, 22], [31]]])
def test_what_is_not_in_the_kv_cache_any_more_is_not_stored(table: list[list[int]]) -> None:
    placer, planner = made(FULL, STATE)
    assert placer.to_store([planner.chunk(KEYS, FULL, 0)], table) == [None]


def test_a_snapshot_with_a_state_that_is_gone_is_not_stored() -> None:
    placer, planner = made(FULL, STATE)
    assert placer.to_store([planner.snapshot(KEYS, 64)], TABLE, {2: 0}) == [None]


def test_only_full_attention_behind_the_null_block_is_local() -> None:
    placer, planner = made(FULL, WINDOW, STATE)
    table = [[0, 12], [0, 0, 0], [0, 0]]
    assert placer.is_local(planner.chunk(KEYS, FULL, 0), table)
    assert not placer.is_local(planner.chunk(KEYS, FULL, 4), table)
    assert not placer.is_local(planner.chunk(KEYS, WINDOW, 0), table)
    assert not placer.is_local(planner.snapshot(KEYS, 64), table)


def test_what_lies_beyond_a_restore_point_is_the_rest_of_its_blocks() -> None:
    placer, _ = made(FULL, WINDOW, STATE)
    assert placer.beyond(80, TABLE) == (Span(0, 12, 16, 48), Span(1, 23, 16, 16))
    assert placer.beyond(96, TABLE) == (Span(0, 12, 32, 32),)
    assert placer.beyond(128, TABLE) == ()


def test_a_group_that_cannot_be_cut_has_nothing_beyond() -> None:
    placer, _ = made(WHOLE)
    assert placer.beyond(64, [[], [], [], [41, 42]]) == ()


def test_beyond_the_table_is_the_null_block() -> None:
    assert [block_at(TABLE, FULL, token) for token in (0, 63, 64, 255, 256)] == [11, 11, 12, 14, 0]
