# SPDX-License-Identifier: Apache-2.0
"""Lookups, load plans and store plans, held to the naive planner that looks at every boundary."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.naive_twin import SetView
from tests.strategies import all_blocks, everything, families_of_prompts, geometries, naive_of
from tests.tiers.entries import entries_of, evict_one
from tests.tiers.integrity import check_integrity
from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.coverage import count_covered
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.index import PrefixIndex

FULL = Group(0, GroupKind.FULL, 1152, 10, 11520, True)
WINDOW = Group(1, GroupKind.WINDOW, 1152, 10, 11520, True, window=1024)
STATE = Group(2, GroupKind.RECURRENT, 1152, 0, 9999, False)


@st.composite
def tiers(draw):
    """A geometry, prompts, and a prefix-closed choice of what a tier could hold of them."""
    geometry, prompts = draw(geometries()), draw(families_of_prompts())
    known = {item.object_id: item for keys in prompts for item in everything(geometry, keys)}
    cuts = {group.group_id: draw(st.integers(0, 100)) for group in geometry.attention}
    luck = random.Random(draw(st.integers(0, 1 << 32)))
    density = draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    held: dict[bytes, PlannedObject] = {}
    for item in known.values():
        if item.object_id.tag.startswith("f"):
            wanted = item.end_tokens <= cuts[item.group_id] or luck.random() < 0.1
        else:
            wanted = luck.random() < density
        if wanted and all(parent in held for parent in item.parents):
            held[item.object_id] = item
    return geometry, prompts, known, held


def asked(data, tier, any_length=False):
    """A prompt's keys, its tokens, and how many of them the device has."""
    geometry, prompts, _, _ = tier
    keys = data.draw(st.sampled_from(prompts))
    num_tokens = len(keys) * geometry.match_unit
    if any_length:
        num_tokens += data.draw(st.integers(0, geometry.match_unit - 1))
        num_tokens = data.draw(st.sampled_from([num_tokens, num_tokens // 2, 1]))
    step = all_blocks(geometry)
    return keys, num_tokens, step * data.draw(st.integers(0, num_tokens // step))


def set_view(known, held):
    parents = {name: item.parents for name, item in known.items()}
    return SetView(held, parents, {name: item.end_tokens for name, item in known.items()})


def index_view(held):
    index = PrefixIndex(None)
    index.restore(held.values())
    assert len(index) == len(held)
    check_integrity(index)
    return index


@settings(max_examples=500, deadline=None)
@given(tiers(), st.data())
def test_a_lookup_is_what_looking_at_every_boundary_says(tier, data):
    geometry, _, known, held = tier
    keys, num_tokens, num_local = asked(data, tier, any_length=True)
    found = HybridOffloadPlanner(geometry).lookup(keys, num_tokens, num_local, set_view(known, held))
    expected = naive_of(geometry).lookup(keys, num_tokens, num_local, set(held))
    assert (found.restore_point, found.junction, found.limited_by, found.limiting_group_id) == expected
    assert found.num_new_tokens == max(0, found.restore_point - num_local)
    assert found.restore_point <= max(0, num_tokens - 1)
    index = index_view(held)
    assert HybridOffloadPlanner(geometry).lookup(keys, num_tokens, num_local, index) == found
    check_integrity(index)


@settings(max_examples=200, deadline=None)
@given(tiers(), st.data())
def test_coverage_counts_leading_chunks_and_the_window_at_the_restore_point(tier, data):
    geometry, prompts, known, held = tier
    keys = data.draw(st.sampled_from(prompts))
    num_tokens = len(keys) * geometry.match_unit
    found = HybridOffloadPlanner(geometry).lookup(keys, num_tokens, 0, set_view(known, held))
    naive = naive_of(geometry)
    for group in geometry.attention:
        expected = naive.leading_tokens(keys, group, num_tokens - 1, set(held))
        if group.kind is GroupKind.WINDOW:
            expected = len(naive.chunk_ends(group, found.restore_point, 0)) * naive.size(group)
        assert found.coverage.tokens[group.group_id] == expected


@settings(max_examples=300, deadline=None)
@given(tiers(), st.data())
def test_a_load_plan_is_what_the_restore_point_needs_beyond_the_local_hit_and_all_of_it_is_there(tier, data):
    geometry, _, known, held = tier
    keys, num_tokens, num_local = asked(data, tier)
    planner = HybridOffloadPlanner(geometry)
    found = planner.lookup(keys, num_tokens, num_local, set_view(known, held))
    plan = planner.load_plan(keys, num_local, found.restore_point)
    if not found.num_new_tokens:
        assert plan == []
        return
    names = [item.object_id for item in plan]
    assert names == naive_of(geometry).needs(keys, found.restore_point, num_local)
    assert all(held[item.object_id] == item for item in plan)
    assert planner.load_plan(keys, num_local, num_local) == []


@settings(max_examples=200, deadline=None)
@given(geometries(), families_of_prompts(max_prompts=1), st.data())
def test_store_plans_hold_every_chunk_once_and_parents_first(geometry, prompts, data):
    keys, planner = prompts[0], HybridOffloadPlanner(geometry)
    num_tokens = len(keys) * geometry.match_unit
    steps = [*sorted(data.draw(st.lists(st.integers(0, num_tokens + 50), max_size=6))), num_tokens + 99]
    cursors: dict[int, int] = {}
    stored: list[PlannedObject] = []
    for computed_tokens in steps:
        plan = planner.store_plan(keys, cursors, computed_tokens)
        assert all(item.end_tokens <= min(computed_tokens, num_tokens) for item in plan)
        stored += plan
        cursors |= {item.group_id: item.end_tokens for item in plan}
    names = [item.object_id for item in stored]
    naive = naive_of(geometry)
    wanted = [
        naive.name(keys, group, end)
        for group in naive.attention
        for end in range(naive.size(group), num_tokens + 1, naive.size(group))
    ]
    assert sorted(names) == sorted(wanted)
    for position, item in enumerate(stored):
        assert all(parent in names[:position] for parent in item.parents)


@settings(max_examples=200, deadline=None)
@given(geometries(), families_of_prompts(max_prompts=1))
def test_everything_that_hangs_below_full_attention_says_so(geometry, prompts):
    objects = {item.object_id: item for item in everything(geometry, prompts[0])}
    sizes = {geometry.tag(group): geometry.chunk_size_of(group) for group in geometry.attention}
    for item in objects.values():
        parents = {parent.tag: objects[parent].end_tokens for parent in item.parents}
        kind = item.object_id.tag
        if kind.startswith("f"):
            expected = {kind: item.start_tokens} if item.start_tokens else {}
        else:
            above = geometry.full if kind == "s" else geometry.full[:1]
            ends = {geometry.tag(group): item.end_tokens for group in above}
            ends = {tag: end - end % sizes[tag] for tag, end in ends.items()}
            expected = {tag: end for tag, end in ends.items() if end}
        assert parents == expected
        if kind == "s":
            assert item.num_bytes == geometry.snapshot_bytes(item.end_tokens)
            assert item.group_id is None
        else:
            assert item.end_tokens - item.start_tokens == sizes[kind]


def test_a_snapshot_where_nothing_can_be_restored_is_refused():
    groups = [Group(0, GroupKind.FULL, 192, 1, 192, False), STATE]
    planner = HybridOffloadPlanner(Geometry.build(groups, 64, "auto"))
    keys = [bytes([i]) for i in range(9)]
    assert planner.snapshot(keys, 384).end_tokens == 384
    for boundary in (0, 64, 200):
        with pytest.raises(ValueError, match="restore unit 192"):
            planner.snapshot(keys, boundary)


@given(st.integers(0, 3000), st.data())
def test_counting_a_prefix_takes_logarithmically_many_probes(num_chunks, data):
    covered = data.draw(st.integers(0, num_chunks))
    probes = []
    assert count_covered(num_chunks, lambda index: probes.append(index) or index < covered) == covered
    assert len(probes) <= math.log2(num_chunks + 1) + 1


def stored(geometry: Geometry, keys: list[bytes], boundaries: list[int], covered: int | None = None) -> PrefixIndex:
    """An index that holds the chunks of ``keys`` up to ``covered`` tokens and the snapshots of ``boundaries``."""
    planner, index = HybridOffloadPlanner(geometry), PrefixIndex(None)
    add(index, planner.store_plan(keys, {}, len(keys) * geometry.match_unit if covered is None else covered))
    add(index, [planner.snapshot(keys, boundary) for boundary in boundaries])
    return index


def add(index: PrefixIndex, plan: list[PlannedObject]) -> None:
    for item in plan:
        ticket = len(index) + 1
        assert index.reserve(item, ticket) is not None
        index.commit(ticket)


class CountingView:
    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.probes = 0

    def has(self, object_id):
        self.probes += 1
        return self.index.has(object_id)

    def nearest_snapshot_chunk(self, object_id):
        self.probes += 1
        return self.index.nearest_snapshot_chunk(object_id)

    def was_evicted(self, object_id):
        self.probes += 1
        return self.index.was_evicted(object_id)


def long_keys(num_units: int, name: str = "a", shared: int = 0) -> list[bytes]:
    return [f"{'a' if i < shared else name}{i}".encode() for i in range(num_units)]


@pytest.mark.parametrize("chunk_size", [64, 1152])
def test_a_lookup_of_a_hundred_thousand_chunks_probes_a_few_dozen_objects(chunk_size):
    geometry = Geometry.build([FULL, STATE], 64, chunk_size)
    keys = long_keys(100_000)
    planner = HybridOffloadPlanner(geometry)
    index = stored(geometry, keys, [])
    for boundary, num_local in {64: 0, 64 * 5_001: 1152 * 246, 64 * 100_000: 1152 * 5_555}.items():
        add(index, [planner.snapshot(keys, boundary)])
        view = CountingView(index)
        assert planner.lookup(keys, 64 * 100_000 + 1, num_local, view).restore_point == boundary
        assert view.probes <= math.log2(100_000) + chunk_size // 64 + 4
        index.drop(geometry.snapshot_id(keys, boundary))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([64, 192, 1152]), st.integers(1, 400), st.data())
def test_probes_of_a_prompts_own_snapshots_are_bounded(chunk_size, num_units, data):
    geometry = Geometry.build([FULL, Group(3, GroupKind.FULL, 1152, 1, 1152, True), STATE], 64, chunk_size)
    keys = long_keys(num_units)
    boundaries = data.draw(st.lists(st.integers(1, num_units).map(lambda n: 64 * n), unique=True, max_size=5))
    view = CountingView(stored(geometry, keys, boundaries))
    num_tokens = data.draw(st.integers(1, 64 * num_units))
    found = HybridOffloadPlanner(geometry).lookup(keys, num_tokens, 0, view)
    assert found.restore_point == max([b for b in boundaries if b < num_tokens], default=0)
    # Two chunks at most: the prompt may end inside one whose only snapshots are beyond its end.
    assert view.probes <= 2 * (math.log2(num_units) + 1) + 3 * (chunk_size // 64) + 4


def with_siblings(geometry: Geometry, keys: list[bytes], own_boundary: int) -> CountingView:
    """An index of ``keys`` of which siblings that left it after each of the chunks 10 to 19 kept snapshots too."""
    index = stored(geometry, keys, [own_boundary])
    for level in range(10, 20):
        sibling = long_keys(18 * level + 5, "b", shared=18 * level)
        add(index, [HybridOffloadPlanner(geometry).snapshot(sibling, 64 * (18 * level + 5))])
    return CountingView(index)


@pytest.mark.parametrize("own_boundary", [1152 * 3, 1152 * 9, 1152 * 10, 1152 * 14 + 64])
def test_snapshots_of_siblings_cost_one_chunk_of_probes_each(own_boundary):
    geometry = Geometry.build([FULL, STATE], 64, 1152)
    keys = long_keys(18 * 50)
    view = with_siblings(geometry, keys, own_boundary)
    assert HybridOffloadPlanner(geometry).lookup(keys, 64 * 18 * 50, 0, view).restore_point == own_boundary
    assert view.probes <= math.log2(50) + (10 + 2) * (18 + 1)


def test_nothing_is_probed_below_the_local_hit():
    geometry = Geometry.build([FULL, STATE], 64, 1152)
    keys = long_keys(18 * 50)
    view = with_siblings(geometry, keys, 1152)
    assert HybridOffloadPlanner(geometry).lookup(keys, 64 * 18 * 50, 1152 * 20, view).num_new_tokens == 0
    assert view.probes <= math.log2(50) + 2


def test_a_missing_window_rules_out_every_boundary_it_is_needed_at():
    geometry = Geometry.build([FULL, WINDOW], 64, 64)
    keys = long_keys(1000)
    planner = HybridOffloadPlanner(geometry)
    index = stored(geometry, keys, [])
    for position in range(100, 1000):
        index.drop(geometry.chunk_id(keys, WINDOW, position))
    view = CountingView(index)
    found = planner.lookup(keys, 64 * 1000 + 1, 0, view)
    assert (found.restore_point, found.limited_by, found.limiting_group_id) == (6400, Reason.WINDOW, 1)
    assert view.probes <= math.log2(1000) + 900 / 15 + 16 + 4


@settings(max_examples=300, deadline=None)
@given(tiers(), st.data())
def test_marking_what_is_needed_last_keeps_a_prefix_for_as_long_as_marking_all_of_it(tier, data):
    """All that a restore would load is marked or below a mark, and nothing goes before what was used before it."""
    geometry, prompts, known, held = tier
    planner, index = HybridOffloadPlanner(geometry), index_view(held)
    used = {object_id: entry.last_use for object_id, entry in entries_of(index).items()}
    for turn in range(data.draw(st.integers(0, 6))):
        keys = data.draw(st.sampled_from(prompts))
        boundary = data.draw(st.integers(0, len(keys))) * geometry.match_unit
        marked = planner.last_needed(keys, boundary)
        index.touch(marked)
        now = len(known) + 1 + turn
        behind = [object_id for object_id in marked if object_id in held]
        while behind:
            object_id = behind.pop()
            used[object_id] = now
            behind.extend(known[object_id].parents)
        if geometry.is_restore_point(boundary):
            restored = {item.object_id for item in planner.load_plan(keys, 0, boundary)}
            if restored <= held.keys():
                assert all(used[object_id] == now for object_id in restored)
    for item in reversed(held.values()):  # parents come first in it
        for parent in item.parents:
            used[parent] = max(used[parent], used[item.object_id])
    gone = [entry.object_id for entry in iter(lambda: evict_one(index), None)]
    assert len(gone) == len(held)
    assert [used[object_id] for object_id in gone] == sorted(used[object_id] for object_id in gone)
