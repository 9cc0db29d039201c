# SPDX-License-Identifier: Apache-2.0
"""Each setting that works and costs something is named, with a value that works; the others are not."""

from dataclasses import replace
from typing import Any

import pytest

from tests.planning.layouts import QWEN_27B, QWEN_27B_EXACT, QWEN_35B, QWEN_35B_EXACT
from vllm_overlay.planning.advice import Advice, Severity, advice
from vllm_overlay.planning.capacity import Conversation, geometry_of, tier_capacity
from vllm_overlay.planning.plan import choose_match_unit
from vllm_overlay.planning.question import EngineLayout, Question
from vllm_overlay.tiers.factory import tier_spec

GOOD: dict[str, Any] = {"block_size": 1088, "prefix_match_unit": 64, "max_num_batched_tokens": 8192}


def given(found: EngineLayout, capacity: str = "8 GiB", **flags: Any) -> list[Advice]:
    """The advice to who gave these flags and got this layout."""
    question, conversation = Question(model="m", **flags), Conversation(8000)
    found = replace(found, max_num_batched_tokens=flags.get("max_num_batched_tokens", 8192))
    unit = choose_match_unit(question, found)
    spec = tier_spec({"tier": "cpu", "capacity_bytes": capacity})
    tier = tier_capacity(spec, geometry_of(found, unit, spec), 1, conversation)
    assert tier is not None
    return advice(question, found, unit, [tier], conversation, outlives_engine=True, host_bytes=0, free_bytes=0)


def warnings(found: EngineLayout, **flags: Any) -> list[Advice]:
    return [item for item in given(found, **flags) if item.severity is Severity.WARNING]


def test_good_settings_have_no_advice() -> None:
    assert given(QWEN_35B_EXACT, **GOOD) == []


def test_a_missing_match_unit_is_chosen_and_said() -> None:
    (item,) = given(QWEN_35B_EXACT, **{**GOOD, "prefix_match_unit": None})
    assert (item.severity, item.setting) == (Severity.NOTE, "--prefix-match-unit")
    assert "the command has 64" in item.sentence and "multiples of 1088" in item.sentence


def test_a_match_unit_of_a_whole_block_costs_hits() -> None:
    (item,) = warnings(QWEN_35B_EXACT, **{**GOOD, "prefix_match_unit": 1088})
    assert item.sentence == "hits are found at multiples of 1088 tokens only: set --prefix-match-unit 64"


@pytest.mark.parametrize(("found", "unit", "exact"), [(QWEN_35B, 48, QWEN_35B_EXACT), (QWEN_27B, 56, QWEN_27B_EXACT)])
def test_a_match_unit_that_is_not_exact_names_a_block_that_makes_it_so(
    found: EngineLayout, unit: int, exact: EngineLayout
) -> None:
    (item,) = warnings(found)
    assert f"{unit} is no multiple of 64" in item.sentence
    assert f"--block-size {exact.block_size} --prefix-match-unit 64 is exact" in item.sentence
    assert warnings(exact, block_size=exact.block_size, prefix_match_unit=64) == []


@pytest.mark.parametrize(
    ("budget", "words"), [(1024, "is below one block of 1088"), (1088, "less than two"), (2175, "less than two")]
)
def test_a_step_budget_near_a_block_is_warned_of(budget: int, words: str) -> None:
    (item,) = warnings(QWEN_35B_EXACT, **{**GOOD, "max_num_batched_tokens": budget})
    assert item.setting == "--max-num-batched-tokens"
    assert words in item.sentence and "--max-num-batched-tokens 2176 or more" in item.sentence
    assert warnings(QWEN_35B_EXACT, **{**GOOD, "max_num_batched_tokens": 2176}) == []


def test_a_hash_that_no_restart_repeats_is_warned_of() -> None:
    (item,) = warnings(QWEN_35B_EXACT, **GOOD, prefix_caching_hash_algo="xxhash_cbor")
    assert item.setting == "--prefix-caching-hash-algo"
    for algorithm in ("sha256", "sha256_cbor"):
        assert warnings(QWEN_35B_EXACT, **GOOD, prefix_caching_hash_algo=algorithm) == []


def test_periodic_states_are_warned_of() -> None:
    (item,) = warnings(QWEN_35B_EXACT, **GOOD, prefix_cache_retention_interval=2176)
    assert item.setting == "--prefix-cache-retention-interval"
    assert warnings(QWEN_35B_EXACT, **GOOD, prefix_cache_retention_interval=0) == []


def test_room_for_less_than_one_conversation_is_warned_of() -> None:
    (item,) = warnings(QWEN_35B_EXACT, capacity="200 MiB", **GOOD)
    needed = int(item.sentence.split()[-2])
    assert "does not hold one conversation of 8000 tokens" in item.sentence
    assert warnings(QWEN_35B_EXACT, capacity=str(needed + (1 << 20)) + " B", **GOOD) == []


@pytest.mark.parametrize(("free_bytes", "is_warned"), [(4096, False), (4095, True)])
def test_more_than_the_free_memory_is_warned_of(free_bytes: int, is_warned: bool) -> None:
    question = Question(model="m", **GOOD)
    items = advice(question, QWEN_35B_EXACT, 64, [], Conversation(8000), False, 4096, free_bytes)
    assert [item.setting for item in items] == ["capacity_bytes"] * is_warned


def test_another_platform_than_ours_is_warned_of() -> None:
    (item,) = warnings(replace(QWEN_35B_EXACT, platform="cuda"), **GOOD)
    assert item.sentence.startswith("this version was never run on 'cuda'")
