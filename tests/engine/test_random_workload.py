# SPDX-License-Identifier: Apache-2.0
"""A short random workload over both tiers and a restart; ``tests/engine/random_workload.py`` runs long ones."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.random_workload import DRAFTERS, RandomWorkload, Seen, fewer_together
from tests.engine.workload import Kind
from tools.tiny_model import make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.engines]


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_random_requests_over_two_lives_are_answered_as_without_a_cache(
    tiny_model: Path, is_asynchronous: bool
) -> None:
    check(RandomWorkload(tiny_model, seed=1, connected={"async_scheduling": is_asynchronous}))


@pytest.mark.parametrize(
    ("drafter", "more"),
    [("mtp", {}), ("oracle", {}), ("oracle", {"num_speculative_tokens_per_batch_size": fewer_together(3)})],
    ids=["mtp", "oracle", "oracle, fewer together"],
)
def test_with_drafts_as_by_vllm_without_a_connector(tmp_path: Path, drafter: str, more: dict[str, Any]) -> None:
    model = make_tiny_model(tmp_path / "model", has_draft_head=True)
    speculation = {**DRAFTERS[drafter], "num_speculative_tokens": 3, **more}
    seen = check(RandomWorkload(model, seed=1, speculation=speculation))
    assert bool(seen.counters["accepted drafts"]) is (drafter == "oracle")


def check(workload: RandomWorkload) -> Seen:
    seen = workload.run(num_requests=60, num_lives=2)
    assert seen.wrong == []
    assert seen.counters["cpu: failed_loads"] == seen.counters["disk: failed_loads"] == 0
    assert seen.turns[Kind.ABORT] and seen.turns[Kind.CONTINUE] and seen.turns[Kind.SALT]
    for happened in ("preemptions", "cpu: restored_tokens", "cpu: evicted_objects", "disk: restored_tokens"):
        assert seen.counters[happened], happened
    return seen
