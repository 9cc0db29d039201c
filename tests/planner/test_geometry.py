# SPDX-License-Identifier: Apache-2.0
"""Chunk sizes, restore points and sizes in bytes, and the errors a wrong geometry gets."""

import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.planner.geometry import Geometry, GeometryError, Group, GroupKind, resolve_chunk_size

MIB = 1 << 20


def full(group_id: int = 0, block_size: int = 1152, token_bytes: int = 10, sliceable: bool = True) -> Group:
    return Group(group_id, GroupKind.FULL, block_size, token_bytes, block_size * token_bytes + 7, sliceable)


def window(group_id: int = 1, block_size: int = 1152, token_bytes: int = 3, sliceable: bool = True) -> Group:
    page_bytes = block_size * token_bytes
    return Group(group_id, GroupKind.WINDOW, block_size, token_bytes, page_bytes, sliceable, window=200)


def state(group_id: int = 2, block_size: int = 1152, page_bytes: int = 5000) -> Group:
    return Group(group_id, GroupKind.RECURRENT, block_size, 0, page_bytes, False)


@pytest.mark.parametrize(
    ("block_size", "match_unit", "chunk_size"),
    [(1152, 64, 64), (1056, 48, 48), (784, 56, 56), (784, 16, 16), (544, 32, 32), (2096, 16, 16), (1152, 16, 64)],
)
def test_auto_on_the_cpu_tier_is_the_largest_valid_size_up_to_64(block_size, match_unit, chunk_size):
    assert resolve_chunk_size([full(block_size=block_size)], match_unit, "auto") == chunk_size


@pytest.mark.parametrize("match_unit", [96, 128, 1152])
def test_auto_is_the_match_unit_when_that_is_coarser_than_64(match_unit):
    assert resolve_chunk_size([full()], match_unit, "auto") == match_unit


def test_auto_on_disk_is_the_smallest_size_whose_largest_groups_object_reaches_the_target():
    groups = [full(token_bytes=20_000), window(token_bytes=100)]
    assert resolve_chunk_size(groups, 64, "auto", target_bytes=384 * 20_000) == 384
    assert resolve_chunk_size(groups, 64, "auto", target_bytes=384 * 20_000 + 1) == 576
    assert resolve_chunk_size(groups, 64, "auto", target_bytes=4 * MIB) == 384  # 192 * 20_000 < 4 MiB <= 384 * 20_000


def test_a_group_that_cannot_be_sliced_does_not_constrain_the_chunk():
    groups = [full(block_size=96), full(1, block_size=160, sliceable=False)]
    assert resolve_chunk_size(groups, 32, 96) == 96


def test_without_a_sliceable_group_the_chunk_is_what_all_blocks_have_in_common():
    groups = [full(block_size=96, sliceable=False), window(block_size=160, sliceable=False)]
    assert resolve_chunk_size(groups, 16, "auto") == 32
    assert resolve_chunk_size(groups, 16, 64) == 32


def test_a_model_without_attention_has_the_match_unit_as_chunk():
    geometry = Geometry.build([state()], 64, "auto")
    assert (geometry.chunk_size, geometry.restore_unit, geometry.max_snapshot_bytes) == (64, 64, 5000)


@given(st.lists(st.sampled_from([32, 48, 64, 96, 160]), min_size=1, max_size=4), st.integers(1, 200), st.data())
def test_an_explicit_size_is_used_when_valid_and_refused_with_valid_neighbours_when_not(blocks, setting, data):
    match_unit = data.draw(st.sampled_from([n for n in range(1, 33) if all(block % n == 0 for block in blocks)]))
    groups = [full(i, block) for i, block in enumerate(blocks)]
    valid = [n for n in range(1, 200) if n % match_unit == 0 and all(block % n == 0 for block in blocks)]
    if setting in valid:
        assert resolve_chunk_size(groups, match_unit, setting) == setting
        return
    with pytest.raises(GeometryError) as caught:
        resolve_chunk_size(groups, match_unit, setting)
    nearest = [n for n in valid if n < setting][-1:] + [n for n in valid if n > setting][:1]
    text = str(caught.value)
    assert text.startswith(f"hybrid_chunk_size={setting} ")
    assert f"match unit {match_unit} " in text
    assert all(str(number) in text for number in {*blocks, *nearest})
    assert text.count(". ") == 0


@given(st.lists(st.sampled_from([32, 48, 64, 96, 160]), min_size=1, max_size=4), st.data(), st.integers(0, 3000))
def test_auto_is_always_valid_and_extreme(blocks, data, target):
    match_unit = data.draw(st.sampled_from([n for n in range(1, 33) if all(block % n == 0 for block in blocks)]))
    groups = [full(i, block, token_bytes=i + 1) for i, block in enumerate(blocks)]
    valid = [n for n in range(1, 200) if n % match_unit == 0 and all(block % n == 0 for block in blocks)]
    small = [n for n in valid if n <= 64]
    assert resolve_chunk_size(groups, match_unit, "auto") == (small[-1] if small else match_unit)
    large = [n for n in valid if n * len(blocks) >= target]
    expected = large[0] if large else math.gcd(*blocks)
    assert resolve_chunk_size(groups, match_unit, "auto", target_bytes=target) == expected


@pytest.mark.parametrize("setting", [True, False, "64", "", None, 64.0, 0, -64])
def test_a_setting_that_is_no_positive_whole_number_is_refused(setting):
    for sliceable in (True, False):
        with pytest.raises(GeometryError, match="hybrid_chunk_size="):
            resolve_chunk_size([full(sliceable=sliceable)], 64, setting)


def test_a_match_unit_that_does_not_divide_an_attention_block_is_refused_with_one_that_does():
    with pytest.raises(GeometryError, match=r"--prefix-match-unit 64 .*1056.* 48 does"):
        Geometry.build([full(block_size=1056), state(block_size=1056)], 64, "auto")


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [full(0), window(0)],
        [full(block_size=0)],
        [full(token_bytes=-1)],
        [Group(0, GroupKind.WINDOW, 64, 1, 64, True)],
    ],
)
def test_groups_that_are_no_kv_cache_are_refused(groups):
    with pytest.raises(GeometryError):
        Geometry.build(groups, 1, "auto")


def test_tags_count_attention_groups_in_vllms_order():
    groups = [state(0), window(1), full(2), state(3), full(4)]
    geometry = Geometry.build(groups, 64, "auto")
    assert [geometry.tag(group) for group in geometry.attention] == ["w0", "f1", "f2"]
    assert geometry.anchor == groups[2]
    assert geometry.recurrent == (groups[0], groups[3])


def test_chunks_are_slices_where_pages_can_be_sliced_and_whole_pages_elsewhere():
    geometry = Geometry.build([full(0), full(1, sliceable=False), state(2)], 64, 64)
    sizes = [(geometry.chunk_size_of(group), geometry.chunk_bytes(group)) for group in geometry.attention]
    assert sizes == [(64, 640), (1152, 11527)]


def test_a_snapshot_is_all_states_and_the_tails_of_the_groups_that_are_cut():
    groups = [full(0), window(1), full(2, block_size=192, sliceable=False), state(3), state(4, page_bytes=1)]
    geometry = Geometry.build(groups, 64, 384)
    assert geometry.restore_unit == 192
    assert geometry.snapshot_bytes(384) == 5001
    assert geometry.snapshot_bytes(576) == 5001 + 192 * (10 + 3)
    assert geometry.max_snapshot_bytes == 5001 + 192 * (10 + 3)


@given(st.sampled_from([16, 32, 64]), st.sampled_from([64, 96, 192]), st.sampled_from([64, 96]), st.booleans())
def test_no_snapshot_is_larger_than_the_largest(match_unit, block, other_block, sliceable):
    if math.gcd(block, other_block) % match_unit:
        return
    groups = [full(0, block), full(1, other_block, sliceable=sliceable), state(2, block)]
    geometry = Geometry.build(groups, match_unit, "auto", target_bytes=1 << 30)
    sizes = [geometry.snapshot_bytes(b) for b in range(1, 1200) if geometry.is_restore_point(b)]
    assert max(sizes) == geometry.max_snapshot_bytes


def test_restore_points_are_multiples_of_every_chunk_when_there_is_no_state_to_save():
    groups = [full(0, 96), window(1, 160, sliceable=False)]
    assert Geometry.build(groups, 32, "auto").restore_unit == math.lcm(32, 160)
    assert Geometry.build([*groups, state(2)], 16, "auto").restore_unit == 160
    assert Geometry.build([full(0, 96), state(2)], 16, "auto").restore_unit == 16


def test_a_window_needs_the_chunks_of_the_tokens_before_the_next_one():
    geometry = Geometry.build([window(0, 16)], 16, 16)
    group = Group(0, GroupKind.WINDOW, 16, 3, 48, True, window=17)
    assert list(geometry.window_chunks(group, 64)) == [3]
    group = Group(0, GroupKind.WINDOW, 16, 3, 48, True, window=18)
    assert list(geometry.window_chunks(group, 64)) == [2, 3]
    assert list(geometry.window_chunks(group, 64, num_local=48)) == [3]
    group = Group(0, GroupKind.WINDOW, 16, 3, 48, True, window=1)
    assert list(geometry.window_chunks(group, 64)) == []


def test_chunked_local_attention_needs_what_follows_the_last_multiple_of_its_size():
    geometry = Geometry.build([window(0, 16)], 16, 16)
    group = Group(0, GroupKind.WINDOW, 16, 3, 48, True, window=48, is_chunked=True)
    assert list(geometry.window_chunks(group, 32)) == [0, 1]
    assert list(geometry.window_chunks(group, 48)) == []
    assert list(geometry.window_chunks(group, 80)) == [3, 4]
    assert list(geometry.window_chunks(group, 80, num_local=64)) == [4]


def test_a_window_needs_its_first_block_whole():
    """vLLM takes the block for computed, and what is not loaded of it would be stored as it is."""
    geometry = Geometry.build([window(0, 64)], 16, 16)
    group = Group(0, GroupKind.WINDOW, 64, 3, 192, True, window=18)
    assert list(geometry.window_chunks(group, 128)) == [4, 5, 6, 7]
    assert list(geometry.window_chunks(group, 80)) == [0, 1, 2, 3, 4]
    assert list(geometry.window_chunks(group, 80, num_local=64)) == [4]


def test_the_log_line_says_exactness_and_the_flag_that_would_refine():
    coarse = Geometry.build([full(0, 1056), state(1, 1056)], 1056, "auto").describe()
    assert "chunks of 1056" in coarse and "are not bit-exact" in coarse and "--prefix-match-unit 48" in coarse
    fine = Geometry.build([full(0), state(1)], 64, "auto").describe()
    assert "are bit-exact" in fine and "--prefix-match-unit" not in fine
    assert "bit-exact" not in Geometry.build([full(0)], 64, "auto").describe()


def test_the_flag_that_would_refine_a_single_group_is_the_one_that_vllm_takes():
    single = Geometry.build([full(0, 128)], 128, "auto").describe()
    assert "--block-size 64 would refine them" in single and "--prefix-match-unit" not in single


def test_the_bytes_of_a_token_and_of_the_states_make_up_every_snapshot_and_chunk():
    groups = [full(0), window(1), state(2), state(3)]
    geometry = Geometry.build(groups, 64, "auto")
    assert geometry.token_bytes == groups[0].token_bytes + groups[1].token_bytes
    assert geometry.state_bytes == groups[2].page_bytes + groups[3].page_bytes
    whole = [replace(group, sliceable=False, token_bytes=0) for group in groups[:2]]
    pages = Geometry.build([*whole, *groups[2:]], 64, "auto")
    assert pages.token_bytes == sum(group.page_bytes / group.block_size for group in whole)
    assert pages.snapshot_bytes(64) == pages.state_bytes


def test_a_geometry_survives_the_way_to_another_process():
    geometry = Geometry.build([full(0), window(1), state(2)], 64, "auto")
    copy = pickle.loads(pickle.dumps(geometry))
    assert copy == geometry and hash(copy) == hash(geometry)
    assert copy.tag(copy.groups[1]) == "w1" and copy.restore_unit == 64
