# SPDX-License-Identifier: Apache-2.0
"""The disk tier behind vLLM's OffloadingConnector in real engines. Its copies are CUDA's, so a small worker of the
tests does them on a CPU (``tests/multi_connector/third_party.py``)."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine.binding import BINDING
from tests.engine.client import Engine, Output, cpu_child, multi, prompt
from tests.engine.damage import flip
from tests.engine.states import FLOAT32
from tests.mounts import on_small_disk, why_not
from tests.patches.trees import linked_originals
from tests.python_path import python_path

pytestmark = pytest.mark.engine

BLOCK = FLOAT32.block_size
NUM_BLOCKS = 2
LENGTH = NUM_BLOCKS * BLOCK + 20
ROW_BYTES = 294912
ROWS = NUM_BLOCKS + 3
"""Of one such prompt: those of attention, and the last state of each other group."""


def offloading(root: Path, **settings: Any) -> dict[str, Any]:
    """vLLM's OffloadingConnector with ours as its only secondary tier. Its CPU tier holds two prompts."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTiering",
            "spec_module_path": "tests.multi_connector.third_party",
            "cpu_bytes_to_use": 2 * ROWS * ROW_BYTES,
            "secondary_tiers": [{"type": "hybrid_disk", "root": str(root), "capacity_bytes": "1 GiB", **settings}],
        },
    }


def forget(engine: Engine, *new_prompts: int) -> None:
    """What was computed so far is on the disk alone. vLLM ranks a prompt's rows when it hears of the prompt's end,
    which may be after the next one has begun: then it keeps a few."""
    for seed in new_prompts:
        engine.generate(prompt(LENGTH, seed))
        engine.wait_for_stores()
    engine.reset_device_cache()


def stored(made: Engine, tokens: list[int]) -> Output:
    """What an engine computed, and restores in its own life too. It is shut down."""
    with made as engine:
        cold = engine.generate(tokens)
        engine.wait_for_stores()
        forget(engine, 2, 3)
        assert_restored(engine, tokens, cold)
        assert engine.metric("vllm:kv_offload_tiering_read_bytes") > 0
        assert engine.metric("vllm:kv_offload_tiering_promotion_job_failures") == 0
    return cold


def assert_restored(engine: Engine, tokens: list[int], cold: Output) -> None:
    engine.wait_for_stores()  # and for what the catalogue has
    restored = engine.generate(tokens)
    assert restored.same_as(cold)
    assert restored.num_cached_tokens >= NUM_BLOCKS * BLOCK


def assert_restored_after_a_restart(start: Callable[[], Engine]) -> None:
    tokens = prompt(LENGTH, seed=1)
    cold = stored(start(), tokens)
    with start() as engine:
        assert_restored(engine, tokens, cold)


def test_a_prompt_is_restored_also_after_a_restart_and_a_flipped_bit_is_computed(
    tiny_model: Path, tmp_path: Path
) -> None:
    root, tokens = tmp_path / "root", prompt(LENGTH, seed=1)
    arguments = {**FLOAT32.arguments, "kv_transfer_config": offloading(root)}
    cold = stored(Engine(tiny_model, **arguments), tokens)
    with Engine(tiny_model, **arguments) as engine:
        assert_restored(engine, tokens, cold)
        forget(engine, 4, 5)
        flip(list(root.glob("*/*/*.r0")))
        damaged = engine.generate(tokens)
        assert damaged.same_as(cold)
        assert damaged.num_cached_tokens == 0
        assert engine.metric("vllm:hybrid_offload_failed_loads", connector="hybrid_disk", reason="checksum") > 0
        # A row that vLLM's CPU tier still has is not read, and its flipped bit not found. Each attempt that restores
        # nothing finds at least one, which is stored anew.
        for seed in range(6, 6 + 2 * ROWS, 2):
            engine.wait_for_stores()
            forget(engine, seed, seed + 1)
            again = engine.generate(tokens)
            assert again.same_as(cold)
            if again.num_cached_tokens:
                break
        assert again.num_cached_tokens >= NUM_BLOCKS * BLOCK


@pytest.mark.engines
def test_two_ranks_are_one_row_and_come_back_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    two_ranks = {**FLOAT32.arguments, "tensor_parallel_size": 2, "kv_transfer_config": offloading(root)}
    assert_restored_after_a_restart(partial(Engine, tiny_model, BINDING, **two_ranks))
    assert list(root.glob("*/*/*.r0"))
    assert not list(root.glob("*/*/*.r1"))


@pytest.mark.faults
def test_one_flipped_bit_in_a_file_of_each_of_35_prompts_gives_35_equal_answers(
    tiny_model: Path, tmp_path: Path
) -> None:
    root, source = tmp_path / "root", random.Random(1)
    prompts = [prompt(BLOCK + 20, seed) for seed in range(45)]  # the last ones are still in vLLM's CPU tier
    cold, files = [], set[Path]()
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=offloading(root)) as engine:
        for tokens in prompts:
            cold.append(engine.generate(tokens))
            engine.wait_for_stores()
            found = set(root.glob("*/*/*.r0"))
            if len(cold) <= 35:
                flip([source.choice(sorted(found - files))])
            files = found
        engine.reset_device_cache()
        for tokens, answer in zip(prompts[:35], cold, strict=False):
            damaged = engine.generate(tokens)
            assert damaged.same_as(answer)
            assert damaged.num_cached_tokens == 0
            engine.wait_for_stores()
        assert engine.metric("vllm:hybrid_offload_failed_loads", connector="hybrid_disk", reason="checksum") == 35


@pytest.mark.faults
@pytest.mark.skipif(bool(why_not()), reason=f"no small file system can be mounted: {why_not()}")
def test_a_full_disk_costs_hits_and_no_answer(tiny_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    arguments = {**FLOAT32.arguments, "kv_transfer_config": offloading(root, min_free_bytes=0)}
    prompts = [prompt(LENGTH, seed) for seed in range(1, 6)]  # 5 rows each, of which the disk holds fewer than 22
    with Engine(tiny_model, launcher=on_small_disk(root, "6m"), **arguments) as engine:
        cold = []
        for tokens in prompts:
            cold.append(engine.generate(tokens))
            engine.wait_for_stores()
        lost = ("dropped_stores", "evicted_objects")  # the latter where it makes room fast enough
        assert sum(engine.metric(f"vllm:hybrid_offload_{name}", connector="hybrid_disk") for name in lost) > 0
        for tokens, answer in zip(prompts, cold, strict=True):
            engine.reset_device_cache()
            assert engine.generate(tokens).same_as(answer)
            engine.wait_for_stores()


@pytest.mark.engines
def test_it_needs_no_patch(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "unpatched").mkdir()
    linked_originals(tmp_path / "unpatched")
    environment = {"PYTHONPATH": python_path(tmp_path / "unpatched")}
    arguments = {**FLOAT32.arguments, "kv_transfer_config": offloading(tmp_path / "root")}
    assert_restored_after_a_restart(partial(Engine, tiny_model, environment, launcher=("env",), **arguments))


@pytest.mark.engines
def test_it_serves_below_our_multi_connector_beside_a_tier_of_ours(tiny_model: Path, tmp_path: Path) -> None:
    child = offloading(tmp_path / "root")
    child["kv_connector_extra_config"] |= {"name": "offloading", "load_weight": 10.0}
    small = cpu_child(capacity_bytes="4 MiB")  # so that it has forgotten the prompt
    tokens = prompt(LENGTH, seed=1)
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=multi(child, small, lookup_timeout_ms=1)) as engine:
        cold = engine.generate(tokens)
        engine.wait_for_stores()
        forget(engine, 2, 3)
        restored = engine.generate(tokens)
        assert restored.same_as(cold)
        assert engine.metric("vllm:kv_connector_loaded_tokens", connector="offloading") >= NUM_BLOCKS * BLOCK
        assert engine.metric("vllm:kv_connector_isolations", connector="offloading") == 0
