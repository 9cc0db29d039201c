# SPDX-License-Identifier: Apache-2.0
"""A prompt of 640 tokens of a model with full attention, a sliding window and states, and its objects."""

from tests.naive_twin import block_hashes
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.planner import HybridOffloadPlanner

GEOMETRY = Geometry.build(
    [
        Group(0, GroupKind.FULL, 128, 40, 5120, True),
        Group(1, GroupKind.WINDOW, 128, 40, 5120, True, window=100),
        Group(2, GroupKind.RECURRENT, 128, 0, 9000, False),
    ],
    16,
    64,
)
PLANNER = HybridOffloadPlanner(GEOMETRY)
KEYS = block_hashes(bytes(range(40)))  # 640 tokens: 10 chunks
NUM_TOKENS = len(KEYS) * GEOMETRY.match_unit + 1


def objects_of(keys, boundaries):
    """All chunks of a prompt, and the snapshots of these boundaries."""
    chunks = PLANNER.store_plan(keys, {}, len(keys) * GEOMETRY.match_unit)
    return [*chunks, *(PLANNER.snapshot(keys, boundary) for boundary in boundaries)]
