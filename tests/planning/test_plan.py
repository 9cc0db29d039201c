# SPDX-License-Identifier: Apache-2.0
"""A plan counts all ranks together, and the flags that it chose are in the command."""

from pathlib import Path

import pytest

from tests.planning.models import LLAMA, QWEN_35B, write_config
from vllm_overlay.planning.capacity import Conversation
from vllm_overlay.planning.plan import Plan, make_plan
from vllm_overlay.planning.question import Question

CHILDREN = [{"tier": "cpu", "capacity_bytes": "8GiB"}]


def plan_for(directory: Path, **given: int) -> Plan:
    return make_plan(Question(model=str(directory), platform="cuda", **given), CHILDREN, Conversation(8000))


def test_two_ranks_together_keep_the_bytes_that_one_does(tmp_path: Path) -> None:
    model = write_config(tmp_path / "m", QWEN_35B)
    one, two = plan_for(model).tiers[0], plan_for(model, tensor_parallel_size=2).tiers[0]
    assert one.token_bytes == two.token_bytes == 10 * 2048
    assert one.snapshot_bytes == pytest.approx(two.snapshot_bytes, rel=0.01)


def test_a_model_of_one_group_gets_no_match_unit(tmp_path: Path) -> None:
    plan = plan_for(write_config(tmp_path / "m", LLAMA), block_size=32)
    assert "--prefix-match-unit" not in plan.command
    assert plan.match_unit == plan.layout.block_size == 32
    assert plan.tiers[0].restore_unit_tokens == 32
