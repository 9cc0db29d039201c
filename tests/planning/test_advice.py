# SPDX-License-Identifier: Apache-2.0
"""Each setting that works and costs something is named, with a value that works; the others are not."""

from dataclasses import replace as replaced
from typing import Any

import pytest
from msgspec.structs import replace
from vllm.engine.arg_utils import EngineArgs

from tests.planning.layouts import QWEN_27B, QWEN_27B_EXACT, QWEN_35B, QWEN_35B_EXACT
from vllm_overlay.config import GIB
from vllm_overlay.planning.advice import Advice, Severity, advice
from vllm_overlay.planning.capacity import Conversation, geometry_of, tier_capacity
from vllm_overlay.planning.host_memory import HostMemory
from vllm_overlay.planning.plan import choose_match_unit
from vllm_overlay.planning.question import EngineLayout, Flags
from vllm_overlay.tiers.factory import tier_spec

GOOD: dict[str, Any] = {"block_size": 1088, "prefix_match_unit": 64, "max_num_batched_tokens": 8192}


def given(found: EngineLayout, capacity: str = "8 GiB", tier: str = "cpu", **flags: Any) -> list[Advice]:
    """The advice to who gave these flags and got this layout."""
    flags.pop("block_size", None)
    given, conversation = Flags(model="m", **flags), Conversation(8000)
    found = replaced(found, max_num_batched_tokens=flags.get("max_num_batched_tokens", 8192))
    unit = choose_match_unit(given, found)
    spec = tier_spec({"tier": tier, "capacity_bytes": capacity, **({"root": "/kv"} if tier == "disk" else {})})
    holds = tier_capacity(spec, geometry_of(found, unit, spec), 1, found.max_num_batched_tokens, conversation)
    assert holds is not None
    return advice(given, found, unit, [holds], conversation, HostMemory(given, found, 0, 0), [])


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


@pytest.mark.parametrize(
    ("unit", "words"),
    [(64, "from each hit: 64 tokens, and 1088 without --prefix-match-unit 64"), (1088, "from each hit: 1088 tokens")],
)
def test_what_a_drafter_costs_each_hit_is_said(unit: int, words: str) -> None:
    drafting = replaced(QWEN_35B_EXACT, has_dropping_drafter=True)
    (item,) = [item for item in given(drafting, **{**GOOD, "prefix_match_unit": unit}) if "--spec" in item.setting]
    assert item.severity is Severity.NOTE
    assert item.sentence.endswith(words)


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


def test_periodic_states_are_warned_of() -> None:
    (item,) = warnings(QWEN_35B_EXACT, **GOOD, prefix_cache_retention_interval=2176)
    assert item.setting == "--prefix-cache-retention-interval"
    assert warnings(QWEN_35B_EXACT, **GOOD, prefix_cache_retention_interval=0) == []


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_room_for_less_than_one_conversation_is_warned_of(tier: str) -> None:
    (item,) = warnings(QWEN_35B_EXACT, capacity="200 MiB", tier=tier, **GOOD)
    needed = int(item.sentence.split()[-2])
    assert item.setting == f"--{tier}"
    assert "does not hold one conversation of 8000 tokens" in item.sentence
    assert warnings(QWEN_35B_EXACT, capacity=f"{needed} B", tier=tier, **GOOD) == []


def of_memory(flags: Flags, tier_bytes: int, free_bytes: int, node_bytes: int = 0) -> list[Advice]:
    found = replaced(QWEN_35B_EXACT, node_bytes=node_bytes)
    return advice(flags, found, 64, [], Conversation(8000), HostMemory(flags, found, tier_bytes, free_bytes), [])


FLAGS = Flags(model="m", prefix_match_unit=64, max_num_batched_tokens=8192)


@pytest.mark.parametrize(
    ("num_engines", "free_bytes", "works"),
    [(1, 32 * GIB, ""), (1, 32 * GIB - 1, "15GiB leaves"), (2, 64 * GIB, ""), (2, 63 * GIB, "15GiB leaves")],
)
def test_more_than_the_free_memory_ends_a_start_and_half_of_it_works(
    num_engines: int, free_bytes: int, works: str
) -> None:
    found = of_memory(replace(FLAGS, num_engines=num_engines), 32 * GIB, free_bytes)
    assert [(item.setting, item.ends_a_start) for item in found] == [("--cpu", True)] * bool(works)
    assert all(works in item.sentence for item in found)


SHARE, BYTES = "--gpu-memory-utilization", "--kv-cache-memory-bytes"


@pytest.mark.parametrize(
    ("given", "tier_gib", "free_gib", "setting", "words"),
    [
        ({}, 1, 64, "", ""),
        ({}, 16, 60, SHARE, "it was not given: vLLM on a CPU takes 58GiB for itself of the 60GiB"),
        ({}, 16, 60, SHARE, "so the command has 0.62"),
        ({"num_engines": 2}, 16, 60, SHARE, "the 32GiB of the tiers, so the command has 0.18"),
        ({"tensor_parallel_size": 2}, 16, 60, SHARE, "so the command has 0.31"),
        ({"gpu_memory_utilization": 0.5}, 16, 60, "", ""),
        ({"gpu_memory_utilization": 0.8}, 16, 60, SHARE, "refuses to start: set --gpu-memory-utilization 0.62"),
        ({"kv_cache_memory_bytes": 8 * GIB}, 16, 60, "", ""),
        ({"kv_cache_memory_bytes": 48 * GIB}, 16, 60, BYTES, "too, or give --gpu-memory-utilization 0.62"),
        ({}, 55, 60, "--cpu", "--cpu 15GiB leaves room for both"),
    ],
)
def test_on_a_cpu_what_vllm_takes_is_weighed_too(
    given: dict[str, Any], tier_gib: int, free_gib: int, setting: str, words: str
) -> None:
    flags = replace(FLAGS, **given)
    found = of_memory(flags, tier_gib * GIB, free_gib * GIB, node_bytes=64 * GIB)
    assert [item.setting for item in found] == [setting] * bool(setting)
    assert all(words in item.sentence and item.ends_a_start == ("not given" not in item.sentence) for item in found)


@pytest.mark.parametrize("num_engines", [1, 2])
def test_the_share_that_a_command_gets_fits(num_engines: int) -> None:
    layout, flags = replaced(QWEN_35B_EXACT, node_bytes=64 * GIB), replace(FLAGS, num_engines=num_engines)
    share = HostMemory(flags, layout, 8 * GIB, 60 * GIB).chosen_share
    assert not HostMemory(replace(flags, gpu_memory_utilization=share), layout, 8 * GIB, 60 * GIB).is_short


def test_the_share_that_nobody_gave_is_vllms_own() -> None:
    layout, default = replaced(QWEN_35B_EXACT, node_bytes=64 * GIB), EngineArgs(model="m").gpu_memory_utilization
    theirs, ours = (
        HostMemory(replace(FLAGS, gpu_memory_utilization=share), layout, 0, 0).vllm_bytes for share in (default, None)
    )
    assert ours == theirs > 0


def test_what_a_disk_tier_will_say_of_its_volume_is_said_before() -> None:
    found = advice(
        FLAGS, QWEN_35B_EXACT, 64, [], Conversation(8000), HostMemory(FLAGS, QWEN_35B_EXACT, 0, 0), ["/kv is small"]
    )
    assert [(item.setting, item.ends_a_start) for item in found] == [("--disk", False)]
    assert found[0].sentence == "/kv is small. The SIZE of --disk is capacity_bytes"


def test_another_platform_than_ours_is_warned_of() -> None:
    (item,) = warnings(replaced(QWEN_35B_EXACT, platform="cuda"), **GOOD)
    assert item.sentence.startswith("this version is new on 'cuda'")
