# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for models and prompts, small enough for brute force and odd enough to break things."""

import math

from hypothesis import strategies as st

from tests.naive_twin import NaivePlanner, block_hashes
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind, common_block_size
from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner


@st.composite
def geometries(draw, max_groups=8, hybrid=False):
    """Groups of every kind, whose block sizes need not divide each other; ``hybrid``: states and full attention."""
    unit = draw(st.sampled_from([1, 2, 4]))
    kinds = draw(st.lists(st.sampled_from(GroupKind), min_size=0 if hybrid else 1, max_size=max_groups - 2 * hybrid))
    groups = []
    for group_id, kind in enumerate([GroupKind.FULL, GroupKind.RECURRENT, *kinds] if hybrid else kinds):
        block_size = unit * draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
        token_bytes = 0 if kind is GroupKind.RECURRENT else draw(st.integers(1, 5))
        page_bytes = block_size * token_bytes + draw(st.integers(1, 9))
        sliceable = kind is not GroupKind.RECURRENT and draw(st.booleans())
        window = draw(st.integers(1, 30)) if kind is GroupKind.WINDOW else 0
        is_chunked = kind is GroupKind.WINDOW and draw(st.booleans())
        groups.append(Group(group_id, kind, block_size, token_bytes, page_bytes, sliceable, window, is_chunked))
    cut = [group for group in groups if group.sliceable]
    common = common_block_size(cut) if cut else unit
    setting = draw(st.sampled_from(["auto", *(n for n in range(unit, common + 1, unit) if common % n == 0)]))
    return Geometry.build(groups, unit, setting, draw(st.none() | st.integers(1, 60)))


@st.composite
def families_of_prompts(draw, max_prompts=3, max_units=40):
    """Keys of prompts that share prefixes with each other and then part."""
    symbols = [draw(st.binary(min_size=1, max_size=max_units))]
    for _ in range(draw(st.integers(0, max_prompts - 1))):
        shared = draw(st.integers(0, len(symbols[0])))
        symbols.append(symbols[0][:shared] + b"\xff" + draw(st.binary(max_size=max_units - shared)))
    return [block_hashes(prompt) for prompt in symbols]


def naive_of(geometry: Geometry) -> NaivePlanner:
    return NaivePlanner(geometry.groups, geometry.match_unit, geometry.chunk_size)


def all_blocks(geometry: Geometry) -> int:
    """Local hits are multiples of this."""
    return math.lcm(*(group.block_size for group in geometry.groups))


def everything(geometry: Geometry, keys: list[bytes]) -> list[PlannedObject]:
    """All a tier could hold of one prompt, parents first."""
    planner = HybridOffloadPlanner(geometry)
    num_tokens = len(keys) * geometry.match_unit
    chunks = planner.store_plan(keys, {}, num_tokens)
    if not geometry.recurrent:
        return chunks
    return chunks + [planner.snapshot(keys, b) for b in range(1, num_tokens + 1) if geometry.is_restore_point(b)]
