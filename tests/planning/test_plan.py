# SPDX-License-Identifier: Apache-2.0
"""A plan counts all ranks together, and the flags that it chose are in the command."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.planning.layouts import LLAMA, QWEN_35B, halved
from vllm_overlay.config import ConfigError
from vllm_overlay.offloading.settings import check_offloading
from vllm_overlay.planning import ask_vllm
from vllm_overlay.planning.advice import Severity
from vllm_overlay.planning.capacity import Conversation
from vllm_overlay.planning.plan import Plan, make_plan
from vllm_overlay.planning.question import EngineLayout, Flags, Question, Reply

CHILDREN = [{"tier": "cpu", "capacity_bytes": "8GiB"}]
BOTH = [*CHILDREN, {"tier": "disk", "root": "/kv", "capacity_bytes": "100GiB"}]


def plan_for(
    monkeypatch: pytest.MonkeyPatch,
    answer: EngineLayout,
    children: Sequence[dict[str, str]] = CHILDREN,
    platform: str = "",
    **given: int,
) -> Plan:
    """vLLM is asked about what is printed."""
    asked: list[Question] = []

    def ask(question: Question) -> Reply:
        asked.append(question)
        return Reply(Flags(model="m", **given), answer)

    monkeypatch.setattr("vllm_overlay.planning.plan.ask_vllm", ask)
    plan = make_plan(["--model", "m"], children, Conversation(8000), platform=platform)
    assert [question.kv_transfer_config for question in asked] == [plan.kv_transfer_config]
    return plan


def test_for_a_gpu_it_is_vllms_connector_over_our_disk_tier_with_rows_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    here_and_there = (QWEN_35B, replace(QWEN_35B, platform="cuda"))
    one, two = (plan_for(monkeypatch, answer, BOTH, "cuda") for answer in here_and_there)
    extra = one.kv_transfer_config["kv_connector_extra_config"]
    assert extra == {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 8 << 30,
        "secondary_tiers": [{"type": "hybrid_disk", "root": "/kv", "capacity_bytes": "100GiB"}],
    }
    check_offloading(extra)
    assert json.dumps(one.kv_transfer_config) == one.command[-1]
    in_memory, on_disk = one.tiers
    row = -(-max(group.page_bytes for group in QWEN_35B.groups) // 4096) * 4096
    assert in_memory.conversation_bytes == row * (8000 // 1056 + 1)  # one group of each kind, one state
    assert in_memory.num_conversations == (8 << 30) // in_memory.conversation_bytes
    assert on_disk.conversation_bytes > in_memory.conversation_bytes  # headers
    assert on_disk.num_conversations > 10 * in_memory.num_conversations
    of_platform = [[item.severity for item in plan.advice if item.setting == "--platform"] for plan in (one, two)]
    assert of_platform == [[Severity.NOTE, Severity.WARNING], [Severity.NOTE]]
    assert ["/dev/shm" in item.sentence for item in one.advice if item.setting == "--cpu"] == [True]
    halves = plan_for(monkeypatch, halved(QWEN_35B), BOTH, "cuda", tensor_parallel_size=2)
    assert halves.tiers[1].num_conversations == on_disk.num_conversations


def test_for_a_gpu_both_sizes_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs --cpu and --disk"):
        make_plan(["--model", "m"], CHILDREN, Conversation(8000), platform="cuda")


def test_two_ranks_together_keep_the_bytes_that_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    one = plan_for(monkeypatch, QWEN_35B).tiers[0]
    two = plan_for(monkeypatch, halved(QWEN_35B), tensor_parallel_size=2).tiers[0]
    assert one.token_bytes == two.token_bytes == 10 * 2048
    assert one.snapshot_bytes == pytest.approx(two.snapshot_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("num_ranks", "staging", "each"), [(1, {}, 4 * 2048 * 32 * 4096), (2, {"staging_bytes": "512 MiB"}, 512 << 20)]
)
def test_the_staging_of_each_rank_is_memory_too(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, staging: dict[str, str], each: int
) -> None:
    children, needed = [CHILDREN[0], BOTH[1] | staging], (8 << 30) + num_ranks * each
    for free_bytes in (needed, needed - 1):
        monkeypatch.setattr("vllm_overlay.planning.plan.available_memory", lambda free=free_bytes: free)
        layout = replace(LLAMA, max_num_batched_tokens=2048)
        plan = plan_for(monkeypatch, layout, children, tensor_parallel_size=num_ranks)
        assert [item.ends_a_start for item in plan.advice if item.setting == "--cpu"] == [True] * (free_bytes < needed)


def test_a_model_of_one_group_gets_no_match_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(monkeypatch, LLAMA)
    assert "--prefix-match-unit" not in plan.command
    assert plan.match_unit == plan.layout.block_size == 16
    assert plan.tiers[0].restore_unit_tokens == 16


def test_without_vllm_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_vllm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="has no vLLM to ask: run this in the environment that will serve the model"):
        make_plan(["--model", "m"], CHILDREN, Conversation(8000))
