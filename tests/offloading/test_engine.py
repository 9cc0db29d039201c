# SPDX-License-Identifier: Apache-2.0
"""The disk tier behind vLLM's OffloadingConnector in real engines. Its copies are CUDA's, so a small worker of the
tests does them on a CPU (``tests/multi_connector/third_party.py``)."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.binding import BINDING
from tests.engine.client import Engine, cpu_child, multi, prompt
from tests.engine.damage import flip
from tests.engine.states import FLOAT32
from tests.patches.trees import linked_originals
from tests.python_path import python_path
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

BLOCK = FLOAT32.block_size
LENGTH = 4 * BLOCK + 20
ROW_BYTES = 294912
ROWS_IN_MEMORY = 20
"""One such prompt has 11 rows: the next but one pushes it out of vLLM's CPU tier."""


def offloading(root: Path, **settings: Any) -> dict[str, Any]:
    """vLLM's OffloadingConnector with ours as its only secondary tier."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTiering",
            "spec_module_path": "tests.multi_connector.third_party",
            "cpu_bytes_to_use": ROWS_IN_MEMORY * ROW_BYTES,
            "secondary_tiers": [{"type": "hybrid_disk", "root": str(root), "capacity_bytes": "1 GiB", **settings}],
        },
    }


def forget(engine: Engine, *new_prompts: int) -> None:
    """What was computed so far is on the disk alone."""
    for seed in new_prompts:
        engine.generate(prompt(LENGTH, seed))
        engine.wait_for_stores()
    engine.reset_device_cache()


def test_a_prompt_is_restored_also_after_a_restart_and_a_flipped_bit_is_computed(
    tiny_model: Path, tmp_path: Path
) -> None:
    root, tokens = tmp_path / "root", prompt(LENGTH, seed=1)
    arguments = {**FLOAT32.arguments, "kv_transfer_config": offloading(root)}
    with Engine(tiny_model, **arguments) as engine:
        cold = engine.generate(tokens)
        engine.wait_for_stores()
        forget(engine, 2, 3)
        restored = engine.generate(tokens)
        assert restored.same_as(cold)
        assert restored.num_cached_tokens >= 4 * BLOCK
        assert engine.metric("vllm:kv_offload_tiering_read_bytes") >= 4 * ROW_BYTES
        assert engine.metric("vllm:kv_offload_tiering_promotion_job_failures") == 0
    with Engine(tiny_model, **arguments) as engine:
        engine.wait_for_stores()  # and for what the catalogue has
        restored = engine.generate(tokens)
        assert restored.same_as(cold)
        assert restored.num_cached_tokens >= 4 * BLOCK
        forget(engine, 4, 5)
        flip(list(root.glob("*/*/*.r0")))
        damaged = engine.generate(tokens)
        assert damaged.same_as(cold)
        assert damaged.num_cached_tokens == 0
        assert engine.metric("vllm:kv_offload_tiering_promotion_job_failures") > 0
        # vLLM does not offer again what it has promised to load: who computes it next stores the last rows.
        for seed in (6, 8):
            engine.wait_for_stores()
            forget(engine, seed, seed + 1)
            again = engine.generate(tokens)
            assert again.same_as(cold)
        assert again.num_cached_tokens >= 4 * BLOCK


@pytest.mark.engines
def test_two_ranks_are_one_row_and_come_back_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    extra = {"tensor_parallel_size": 2, "kv_transfer_config": offloading(tmp_path / "root")}
    tokens = prompt(LENGTH, seed=1)
    with Engine(tiny_model, BINDING, **FLOAT32.arguments, **extra) as engine:
        cold = engine.generate(tokens)
        engine.wait_for_stores()
        forget(engine, 2, 3)
        restored = engine.generate(tokens)
        assert restored.same_as(cold)
        assert restored.num_cached_tokens >= 4 * BLOCK
    assert list((tmp_path / "root").glob("*/*/*.r0"))
    assert not list((tmp_path / "root").glob("*/*/*.r1"))
    with Engine(tiny_model, BINDING, **FLOAT32.arguments, **extra) as engine:
        engine.wait_for_stores()
        restored = engine.generate(tokens)
        assert restored.same_as(cold)
        assert restored.num_cached_tokens >= 4 * BLOCK


@pytest.mark.engines
def test_it_needs_no_patch(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "unpatched").mkdir()
    linked_originals(tmp_path / "unpatched")
    environment = {"PYTHONPATH": python_path(tmp_path / "unpatched")}
    arguments = {**FLOAT32.arguments, "kv_transfer_config": offloading(tmp_path / "root")}
    tokens = prompt(LENGTH, seed=1)
    with Engine(tiny_model, environment, launcher=("env",), **arguments) as engine:
        cold = engine.generate(tokens)
        engine.wait_for_stores()
    with Engine(tiny_model, environment, launcher=("env",), **arguments) as engine:
        engine.wait_for_stores()
        restored = engine.generate(tokens)
    assert restored.same_as(cold)
    assert restored.num_cached_tokens >= 4 * BLOCK


@pytest.mark.engines
def test_it_serves_below_our_multi_connector_beside_a_tier_of_ours(tiny_model: Path, tmp_path: Path) -> None:
    child = offloading(tmp_path / "root")
    child["kv_connector_extra_config"] |= {"name": "offloading", "load_weight": 10.0}
    small = cpu_child(capacity_bytes="4 MiB")  # so that it has forgotten the prompt
    # It is still looking while it reads from the disk, which on a busy machine takes longer than the default's 50.
    config = multi(child, small, lookup_timeout_ms=1000 * PATIENCE_S)
    tokens = prompt(LENGTH, seed=1)
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=config) as engine:
        cold = engine.generate(tokens)
        engine.wait_for_stores()
        forget(engine, 2, 3)
        restored = engine.generate(tokens)
        assert restored.same_as(cold)
        assert engine.metric("vllm:kv_connector_loaded_tokens", connector="offloading") >= 4 * BLOCK
        assert engine.metric("vllm:kv_connector_isolations", connector="offloading") == 0
