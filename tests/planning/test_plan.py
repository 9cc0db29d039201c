# SPDX-License-Identifier: Apache-2.0
"""A plan counts all ranks together, and the flags that it chose are in the command."""

import pytest

from tests.planning.layouts import LLAMA, QWEN_35B, halved
from vllm_overlay.config import ConfigError
from vllm_overlay.planning import ask_vllm
from vllm_overlay.planning.capacity import Conversation
from vllm_overlay.planning.plan import Plan, make_plan
from vllm_overlay.planning.question import EngineLayout, Flags, Reply

CHILDREN = [{"tier": "cpu", "capacity_bytes": "8GiB"}]


def plan_for(monkeypatch: pytest.MonkeyPatch, answer: EngineLayout, **given: int) -> Plan:
    reply = Reply(Flags(model="m", **given), answer)
    monkeypatch.setattr("vllm_overlay.planning.plan.ask_vllm", lambda question: reply)
    return make_plan(["--model", "m"], CHILDREN, Conversation(8000))


def test_two_ranks_together_keep_the_bytes_that_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    one = plan_for(monkeypatch, QWEN_35B).tiers[0]
    two = plan_for(monkeypatch, halved(QWEN_35B), tensor_parallel_size=2).tiers[0]
    assert one.token_bytes == two.token_bytes == 10 * 2048
    assert one.snapshot_bytes == pytest.approx(two.snapshot_bytes, rel=0.01)


def test_a_model_of_one_group_gets_no_match_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(monkeypatch, LLAMA)
    assert "--prefix-match-unit" not in plan.command
    assert plan.match_unit == plan.layout.block_size == 16
    assert plan.tiers[0].restore_unit_tokens == 16


def test_without_vllm_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_vllm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="has no vLLM to ask: run this in the environment that will serve the model"):
        make_plan(["--model", "m"], CHILDREN, Conversation(8000))
