# SPDX-License-Identifier: Apache-2.0
"""An index of many objects costs the garbage collector nothing, and frees what it forgets without it."""

import gc
import sys
from collections.abc import Iterator

import pytest

from tests.tiers.integrity import check_integrity
from tests.waiting import until
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.cpu import CpuTierManager
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.base import NeverEvicts
from vllm_overlay.tiers.policies.learned import LearnedEviction
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed

NUM_OBJECTS = 20_000
POLICIES = [LeastRecentlyUsed, NeverEvicts, LearnedEviction]


@pytest.fixture(autouse=True)
def _only_what_the_test_makes() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def filled(index: PrefixIndex) -> PrefixIndex:
    """Prompts of ten chunks, each with a snapshot in the middle."""
    for prompt in range(NUM_OBJECTS // 11):
        parents: tuple[ObjectId, ...] = ()
        for place in range(10):
            object_id = ObjectId("f0", prompt.to_bytes(4, "big") + bytes([place]))
            index.restore([PlannedObject(object_id, parents, 64 * place, 64 * place + 64, 10, 0)])
            parents = (object_id,)
            if place == 5:
                index.restore([PlannedObject(ObjectId("s", object_id.key), parents, 384, 384, 10)])
        index.nearest_snapshot_chunk(parents[0])
    return index


@pytest.mark.parametrize("policy", POLICIES)
def test_the_garbage_collector_passes_by_an_indexs_objects(policy: type) -> None:
    index = filled(PrefixIndex(None, policy()))
    gc.collect()
    assert len(index) > NUM_OBJECTS // 2
    assert len(gc.get_objects()) < NUM_OBJECTS // 2  # other threads of a long run make some too


@pytest.mark.parametrize("policy", POLICIES)
def test_what_an_index_forgets_is_freed(policy: type) -> None:
    filled(PrefixIndex(None, policy())).clear()
    before = sys.getallocatedblocks()
    for _ in range(3):
        index = filled(PrefixIndex(None, policy()))
        index.clear()
        del index
    assert (
        sys.getallocatedblocks() - before < NUM_OBJECTS
    )  # of one of the three; other threads of a long run allocate too


@pytest.mark.parametrize("policy", POLICIES)
def test_dropped_prompts_are_freed_while_others_stay(policy: type) -> None:
    index = filled(PrefixIndex(None, policy()))
    roots = [object_id for object_id in index.visible() if object_id.key[-1] == 0 and not object_id.is_snapshot]
    full = sys.getallocatedblocks()
    for root in roots[: len(roots) // 2]:
        index.drop(root)
    assert full - sys.getallocatedblocks() > len(index)
    check_integrity(index)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_closed_tier_had_is_freed(policy: type) -> None:
    filled(PrefixIndex(None, policy())).clear()
    before = sys.getallocatedblocks()
    for _ in range(3):
        tier = CpuTierManager(NUM_OBJECTS, 10, 1, policy())
        filled(tier.index)
        tier.close()
        del tier
    until(lambda: sys.getallocatedblocks() - before < NUM_OBJECTS)
