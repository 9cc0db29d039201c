# SPDX-License-Identifier: Apache-2.0
"""Lookups in a store that answers in batches and holds what nothing depends on."""

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import everything, families_of_prompts, geometries
from vllm_overlay.planner.batched_hits import BATCH_OBJECTS, BatchedHits
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.objects import ObjectId, ObjectKind
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.index import PrefixIndex


class Store:
    """Knows names and nothing of what they stand for."""

    def __init__(self, held: set[ObjectId]) -> None:
        self.held = held
        self.batches: list[list[ObjectId]] = []

    def has_each(self, object_ids: Sequence[ObjectId]) -> list[bool]:
        self.batches.append(list(object_ids))
        assert 0 < len(object_ids) <= BATCH_OBJECTS
        return [object_id in self.held for object_id in object_ids]


@settings(max_examples=300, deadline=None)
@given(geometries(), families_of_prompts(), st.integers(0, 1 << 32), st.sampled_from([0.5, 0.9, 0.98, 1.0]), st.data())
def test_a_lookup_finds_what_an_index_of_the_reachable_objects_finds(geometry, prompts, seed, density, data):
    luck = random.Random(seed)
    known = {item.object_id: item for keys in prompts for item in everything(geometry, keys)}
    held = {object_id for object_id in known if luck.random() < density}
    index = PrefixIndex(None)
    index.restore(known[object_id] for object_id in known if object_id in held)
    keys = data.draw(st.sampled_from(prompts))
    num_tokens = data.draw(st.integers(0, len(keys) * geometry.match_unit + 5))
    planner = HybridOffloadPlanner(geometry)
    batched = planner.lookup(keys, num_tokens, 0, BatchedHits(geometry, keys, num_tokens, Store(held)))
    reference = planner.lookup(keys, num_tokens, 0, index)
    # An index forgets windows and snapshots too when a chunk above them is missing; the store still has those.
    assert batched.restore_point >= reference.restore_point
    assert batched.coverage.reach == reference.coverage.reach
    needed = planner.load_plan(keys, 0, batched.restore_point)
    assert all(item.object_id in held for item in needed)


def test_a_gap_in_full_attention_ends_a_hit_whatever_comes_after() -> None:
    geometry = Geometry.build([Group(0, GroupKind.FULL, 64, 8, 512, True)], 16, 64)
    keys = [bytes([n]) * 32 for n in range(1, 41)]
    everything_but_the_third = {geometry.chunk_id(keys, geometry.full[0], index) for index in (0, 1, 3, 4, 5)}
    hits = BatchedHits(geometry, keys, 640, Store(everything_but_the_third))
    assert HybridOffloadPlanner(geometry).lookup(keys, 640, 0, hits).restore_point == 128


def test_a_long_prompt_costs_a_question_for_each_256_chunks_and_each_256_boundaries() -> None:
    groups = [Group(0, GroupKind.FULL, 640, 8, 5120, True), Group(1, GroupKind.RECURRENT, 640, 0, 9999, False)]
    geometry = Geometry.build(groups, 64, 64)
    keys = [n.to_bytes(32, "big") for n in range(1, 401)]
    held = {geometry.chunk_id(keys, geometry.full[0], index) for index in range(400)}
    held.add(geometry.snapshot_id(keys, 64 * 100))
    store = Store(held)
    num_tokens = 400 * 64 + 1
    found = HybridOffloadPlanner(geometry).lookup(keys, num_tokens, 0, BatchedHits(geometry, keys, num_tokens, store))
    assert found.restore_point == 64 * 100
    asked = [(batch[0].kind, len(batch)) for batch in store.batches]
    chunk, snapshot = ObjectKind.FULL_ATTENTION, ObjectKind.SNAPSHOT
    assert asked == [(chunk, 256), (chunk, 144), (snapshot, 256), (snapshot, 144)]
