# SPDX-License-Identifier: Apache-2.0
"""Each setting that works and costs something is named, with a value that works; the others are not."""

from typing import Any

import pytest

from tests.planning.models import QWEN_27B, QWEN_35B
from tests.planning.test_formula import layout
from vllm_overlay.planning.advice import Advice, Severity, advice
from vllm_overlay.planning.capacity import Conversation, geometry_of, tier_capacity
from vllm_overlay.planning.plan import choose_match_unit
from vllm_overlay.planning.question import Question
from vllm_overlay.tiers.factory import tier_spec

GOOD: dict[str, Any] = {"block_size": 1088, "prefix_match_unit": 64, "max_num_batched_tokens": 8192}


def given(config: dict[str, Any], capacity: str = "8 GiB", **flags: Any) -> list[Advice]:
    """The advice, without that on the platform: blocks are those of CUDA."""
    question, conversation = Question(model="m", **flags), Conversation(8000)
    found = layout(config, **flags)
    unit = choose_match_unit(question, found)
    spec = tier_spec({"tier": "cpu", "capacity_bytes": capacity})
    tier = tier_capacity(spec, geometry_of(found, unit, spec), 1, conversation)
    assert tier is not None
    return advice(question, found, unit, [tier], conversation, outlives_engine=True)


def warnings(config: dict[str, Any], **flags: Any) -> list[Advice]:
    return [item for item in given(config, **flags) if item.severity is Severity.WARNING]


def test_good_settings_have_no_advice() -> None:
    assert given(QWEN_35B, **GOOD) == []


def test_a_missing_match_unit_is_chosen_and_said() -> None:
    (item,) = given(QWEN_35B, **{**GOOD, "prefix_match_unit": None})
    assert (item.severity, item.setting) == (Severity.NOTE, "--prefix-match-unit")
    assert "the command has 64" in item.sentence and "multiples of 1088" in item.sentence


def test_a_match_unit_of_a_whole_block_costs_hits() -> None:
    (item,) = warnings(QWEN_35B, **{**GOOD, "prefix_match_unit": 1088})
    assert item.sentence == "hits are found at multiples of 1088 tokens only: set --prefix-match-unit 64"


@pytest.mark.parametrize(("config", "unit", "block_size"), [(QWEN_35B, 48, 1088), (QWEN_27B, 56, 832)])
def test_a_match_unit_that_is_not_exact_names_a_block_that_makes_it_so(
    config: dict[str, Any], unit: int, block_size: int
) -> None:
    (item,) = warnings(config, max_num_batched_tokens=8192)
    assert f"{unit} is no multiple of 64" in item.sentence
    assert f"--block-size {block_size} --prefix-match-unit 64 is exact" in item.sentence
    assert warnings(config, max_num_batched_tokens=8192, block_size=block_size, prefix_match_unit=64) == []


@pytest.mark.parametrize(
    ("budget", "words"), [(1024, "is below one block of 1088"), (1088, "less than two"), (2175, "less than two")]
)
def test_a_step_budget_near_a_block_is_warned_of(budget: int, words: str) -> None:
    (item,) = warnings(QWEN_35B, **{**GOOD, "max_num_batched_tokens": budget})
    assert item.setting == "--max-num-batched-tokens"
    assert words in item.sentence and "--max-num-batched-tokens 2176 or more" in item.sentence
    assert warnings(QWEN_35B, **{**GOOD, "max_num_batched_tokens": 2176}) == []


def test_a_hash_that_no_restart_repeats_is_warned_of() -> None:
    (item,) = warnings(QWEN_35B, **GOOD, prefix_caching_hash_algo="xxhash_cbor")
    assert item.setting == "--prefix-caching-hash-algo"
    for algorithm in ("sha256", "sha256_cbor"):
        assert warnings(QWEN_35B, **GOOD, prefix_caching_hash_algo=algorithm) == []


def test_periodic_states_are_warned_of() -> None:
    (item,) = warnings(QWEN_35B, **GOOD, prefix_cache_retention_interval=2176)
    assert item.setting == "--prefix-cache-retention-interval"
    assert warnings(QWEN_35B, **GOOD, prefix_cache_retention_interval=0) == []


def test_room_for_less_than_one_conversation_is_warned_of() -> None:
    (item,) = warnings(QWEN_35B, capacity="200 MiB", **GOOD)
    needed = int(item.sentence.split()[-2])
    assert "does not hold one conversation of 8000 tokens" in item.sentence
    assert warnings(QWEN_35B, capacity=str(needed + (1 << 20)) + " B", **GOOD) == []


@pytest.mark.parametrize(("free_bytes", "is_warned"), [(4096, False), (4095, True), (None, False)])
def test_more_than_the_free_memory_is_warned_of(free_bytes: int | None, is_warned: bool) -> None:
    question, found = Question(model="m", **GOOD), layout(QWEN_35B, **GOOD)
    items = advice(question, found, 64, [], Conversation(8000), False, host_bytes=4096, free_bytes=free_bytes)
    assert [item.setting for item in items] == ["capacity_bytes"] * is_warned


def test_another_platform_than_ours_is_warned_of() -> None:
    (item,) = warnings(QWEN_35B, **GOOD, platform="cuda")
    assert item.setting == "--platform"
    assert "never run on 'cuda'" in item.sentence
