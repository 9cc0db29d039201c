# SPDX-License-Identifier: Apache-2.0
"""Which steps leave a snapshot that vLLM does not offer. Blocks, and so the steps, have multiples of 64 tokens."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.harness import GEOMETRY, HYBRID, Harness
from vllm_overlay.connector.factory import AUTO_SPECULATIVE_STATES, AUTO_SPECULATIVE_TOKENS, speculative_snapshot_tokens
from vllm_overlay.planner.objects import SNAPSHOT_TAG
from vllm_overlay.tiers.factory import tier_spec

ROOM = AUTO_SPECULATIVE_STATES * HYBRID.state_bytes * 2
"""Bytes of so many states, of two ranks."""


def boundaries(harness: Harness, steps: list[int], num_tokens: int, start: int = 0, **options: Any) -> list[int]:
    """Where a prompt's snapshots lie when it goes on at ``start`` and is computed in these steps."""
    request = harness.request("a", num_tokens)
    harness.scheduler.lookup(request, start)
    request.num_computed_tokens = start
    found = []
    for step in steps:
        jobs = harness.plan(request, step, **options)
        harness.report(jobs)
        found += [job.ticket.planned.end_tokens for job in jobs if job.ticket.planned.object_id.tag == SNAPSHOT_TAG]
    return found


@pytest.mark.parametrize(
    ("steps", "num_tokens", "start", "kept"),
    [
        ([64] * 6, 1000, 0, [192, 384]),
        ([256] * 3, 1000, 0, [256, 512, 768]),
        ([128, 320, 64, 128], 1000, 0, [448, 640]),
        ([64] * 4, 1000, 128, [320]),
        ([192, 192], 1000, 64, [256, 448]),
        ([192, 192, 8], 392, 0, [192]),
        ([192, 192, 9], 393, 0, [192]),
        ([192, 192, 17], 401, 0, [192, 384]),
        ([200, 200], 1000, 0, [400]),
    ],
    ids=[
        "every third step", "every step", "the first step that is far enough", "from the local hit on",
        "from a local hit that is no multiple", "not where the prompt's last lies",
        "not at the last restore point", "below the last restore point", "not where no restore point is",
    ],
)  # fmt: skip
def test_a_step_that_ends_far_enough_after_the_last_snapshot_leaves_one(
    steps: list[int], num_tokens: int, start: int, kept: list[int]
) -> None:
    assert boundaries(Harness(geometry=HYBRID, speculative_snapshot_tokens=192), steps, num_tokens, start) == kept


@pytest.mark.parametrize(("num_tokens", "kept"), [(392, [192]), (416, [192, 384]), (415, [192]), (417, [192, 384])])
def test_none_lies_where_vllm_keeps_the_prompts_last_below_a_dropped_unit(num_tokens: int, kept: list[int]) -> None:
    """A drafter reads ahead, so that lies one unit of 16 tokens lower."""
    harness = Harness(geometry=HYBRID, speculative_snapshot_tokens=192, lookahead_units=1)
    assert boundaries(harness, [192, 192, num_tokens - 384], num_tokens) == kept


def test_distance_is_counted_from_a_state_that_vllm_offers() -> None:
    harness = Harness(geometry=HYBRID, speculative_snapshot_tokens=192)
    assert boundaries(harness, [128], 1000, states_at=128) == [128]
    request = harness.scheduler._tracked["a"].request
    jobs = [harness.jobs_of_step(request, 64) for _ in range(3)]
    kept = [job.ticket.planned.end_tokens for each in jobs for job in each if job.ticket.planned.group_id is None]
    assert kept == [320]


def test_nothing_is_kept_without_the_setting_or_without_states() -> None:
    assert boundaries(Harness(geometry=HYBRID), [64] * 6, 1000) == []
    assert boundaries(Harness(geometry=GEOMETRY, speculative_snapshot_tokens=64), [64] * 6, 1000) == []


def test_the_state_is_in_the_block_of_the_steps_last_token() -> None:
    """Of a table that is longer: with speculative decoding it ends with blocks for drafts."""
    harness = Harness(geometry=HYBRID, speculative_snapshot_tokens=192)
    request = harness.looked_up("a", 1000)
    (*_, job) = harness.plan(request, 192)
    assert job.placement.pages == ((1, 3),)


def test_a_state_whose_block_is_gone_is_not_stored() -> None:
    harness = Harness(geometry=HYBRID, speculative_snapshot_tokens=192)
    harness.looked_up("a", 1000)
    harness.scheduler.begin_step(["a"])
    state = SimpleNamespace(boundary_state_offloads={}, get_block_ids=lambda _: [[1, 2, 3], [0, 0, 0]])
    output: Any = SimpleNamespace(num_scheduled_tokens={"a": 192}, kv_connector_block_state=state)
    assert all(job.ticket.planned.object_id.tag != SNAPSHOT_TAG for job in harness.scheduler.plan_stores(output))


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"tier": "cpu"}, AUTO_SPECULATIVE_TOKENS),
        ({"tier": "cpu", "capacity_bytes": ROOM}, AUTO_SPECULATIVE_TOKENS),
        ({"tier": "cpu", "capacity_bytes": ROOM - 1}, 0),
        ({"tier": "cpu", "capacity_bytes": ROOM - 1, "speculative_snapshot_tokens": 4096}, 4096),
        ({"tier": "cpu", "eviction_policy": "learned"}, AUTO_SPECULATIVE_TOKENS),
        ({"tier": "cpu", "eviction_policy": "lru"}, 0),
        ({"tier": "cpu", "eviction_policy": "lru", "speculative_snapshot_tokens": 4096}, 4096),
        ({"tier": "cpu", "speculative_snapshot_tokens": 0}, 0),
        ({"tier": "disk", "root": "/root"}, AUTO_SPECULATIVE_TOKENS),
        ({"tier": "disk", "root": "/root", "eviction_policy": "lru"}, 0),
    ],
    ids=str,
)
def test_by_default_they_are_kept_where_they_cost_no_hits(settings: dict[str, Any], tokens: int) -> None:
    assert speculative_snapshot_tokens(tier_spec(settings), HYBRID, world_size=2) == tokens
