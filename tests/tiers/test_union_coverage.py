# SPDX-License-Identifier: Apache-2.0
"""What two tiers cover together: no more than one of them alone, unless windows or objects for themselves come in."""

from collections.abc import Sequence

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.strategies import everything, families_of_prompts, geometries
from tests.tiers.entries import evict_one
from vllm_overlay.planner.batched_hits import BatchedHits
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.index import PrefixIndex


class Union:
    """Several tiers as one store."""

    def __init__(self, *tiers: PrefixIndex | set[ObjectId]) -> None:
        self._tiers = tiers

    def has_each(self, object_ids: Sequence[ObjectId]) -> Sequence[bool]:
        return [any(_has(tier, object_id) for tier in self._tiers) for object_id in object_ids]


def _has(tier: PrefixIndex | set[ObjectId], object_id: ObjectId) -> bool:
    return tier.has(object_id) if isinstance(tier, PrefixIndex) else object_id in tier


def index_of(objects: Sequence[PlannedObject], num_evicted: int = 0) -> PrefixIndex:
    """What of ``objects``, parents first, is reachable, less some evictions."""
    index = PrefixIndex(None)
    for ticket, planned in enumerate(objects):
        if index.reserve(planned, ticket) is not None:
            index.commit(ticket)
    for _ in range(num_evicted):
        evict_one(index)
    return index


def restore_points(geometry: Geometry, keys: list[bytes], num_local: int, *tiers) -> tuple[list[int], int]:
    """Of each tier alone, and of all together."""
    planner = HybridOffloadPlanner(geometry)
    num_tokens = len(keys) * geometry.match_unit + 1

    def found(*of) -> int:
        hits = BatchedHits(geometry, keys, num_tokens, Union(*of))
        return planner.lookup(keys, num_tokens, num_local, hits).restore_point

    return [found(tier) for tier in tiers], found(*tiers)


def is_one_chain(geometry: Geometry) -> bool:
    """Whether a restore point hangs on one object, whose parents are all the others that it needs."""
    return not geometry.windows and bool(geometry.recurrent or len(geometry.full) == 1)


@given(st.data(), families_of_prompts())
def test_two_prefix_closed_tiers_restore_no_more_than_the_better_one(data, prompts) -> None:
    geometry = data.draw(geometries().filter(is_one_chain))
    objects = {planned.object_id: planned for keys in prompts for planned in everything(geometry, keys)}
    tiers = []
    for _ in range(2):
        missing = data.draw(st.sets(st.sampled_from(sorted(objects)), max_size=4)) if objects else set()
        held = [planned for object_id, planned in objects.items() if object_id not in missing]
        tiers.append(index_of(held, data.draw(st.integers(0, 6))))
    for keys in prompts:
        local = data.draw(st.integers(0, 2)) * max(group.block_size for group in geometry.groups)
        assume(local % geometry.match_unit == 0)
        alone, together = restore_points(geometry, keys, local, *tiers)
        assert together == max(alone)


def made(*groups: Group) -> tuple[Geometry, list[bytes], HybridOffloadPlanner]:
    geometry = Geometry.build(groups, 4, 4)
    return geometry, [bytes([unit]) for unit in range(4)], HybridOffloadPlanner(geometry)


FULL = Group(0, GroupKind.FULL, 4, 1, 4, sliceable=True)


def test_tiers_that_hold_objects_for_themselves_restore_more_together() -> None:
    geometry, keys, _ = made(FULL, Group(1, GroupKind.RECURRENT, 4, 0, 9, sliceable=False))
    heads = {geometry.chunk_id(keys, FULL, index) for index in (0, 1)}
    tails = {geometry.chunk_id(keys, FULL, 2), geometry.snapshot_id(keys, 12)}
    assert restore_points(geometry, keys, 0, heads, tails) == ([0, 0], 12)


def test_tiers_that_have_evicted_different_windows_restore_more_together() -> None:
    """A window of two chunks: one tier has lost the first, the other one the second."""
    window = Group(1, GroupKind.WINDOW, 4, 1, 4, sliceable=True, window=8)
    geometry, keys, planner = made(FULL, window)
    full = [planner.chunk(keys, FULL, index) for index in range(4)]
    windows = [planner.chunk(keys, window, index) for index in range(4)]
    tiers = index_of(full + windows[:3]), index_of([*full, windows[0], windows[3]])
    assert restore_points(geometry, keys, 0, *tiers) == ([12, 4], 16)


def test_attention_groups_of_two_tiers_restore_more_together_without_states() -> None:
    second = Group(1, GroupKind.FULL, 4, 1, 4, sliceable=True)
    geometry, keys, planner = made(FULL, second)
    firsts, seconds = ([planner.chunk(keys, group, index) for index in range(3)] for group in (FULL, second))
    tiers = index_of(firsts + seconds[:1]), index_of(firsts[:1] + seconds)
    assert restore_points(geometry, keys, 0, *tiers) == ([4, 4], 12)
