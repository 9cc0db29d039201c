# SPDX-License-Identifier: Apache-2.0
"""Connectors that are not ours, as children in a real engine."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import Engine, cpu_child, multi, prompt
from tests.engine.states import FLOAT32

pytestmark = pytest.mark.engine

LENGTH = 2400
BLOCK = FLOAT32.block_size


def offloading_child(root: Path, **settings: Any) -> dict[str, Any]:
    """vLLM's OffloadingConnector: a CPU tier, and behind it a file system."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "name": "offloading",
            "spec_name": "CpuTiering",
            "spec_module_path": "tests.multi_connector.third_party",
            "cpu_bytes_to_use": 128 << 20,
            "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
            **settings,
        },
    }


def test_vllms_offloading_connector_loads_what_it_stored_beside_a_tier_of_ours(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = multi(offloading_child(tmp_path / "fs", load_weight=10.0), cpu_child())
    tokens, other = prompt(LENGTH, seed=1), prompt(LENGTH, seed=2)
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=config) as engine:
        cold = engine.generate(tokens)
        engine.generate(other)
        engine.wait_for_stores()
        engine.reset_device_cache()
        restored = engine.generate(tokens)
        assert restored.same_as(cold)
        assert restored.num_cached_tokens >= 2 * BLOCK
        assert engine.metric("vllm:kv_connector_chosen", connector="offloading") == 1
        assert engine.metric("vllm:kv_connector_loaded_tokens", connector="offloading") >= 2 * BLOCK
        assert engine.metric("vllm:kv_connector_isolations", connector="offloading") == 0
        # Ours has the finer restore point, and is chosen when its weight says so.
        assert engine.metric("vllm:kv_connector_outbid", connector="cpu") == 1


@pytest.mark.engines
@pytest.mark.parametrize("weight", [0.1, 10.0], ids=["ours-loads", "third-party-loads"])
def test_local_attention_is_left_out_by_the_child_that_can_and_loaded_by_the_one_that_cannot(
    tiny_model: Path, tmp_path: Path, weight: float
) -> None:
    """A device cache that has lost only its states, over a tier of ours beside vLLM's OffloadingConnector."""
    config = multi(cpu_child(), offloading_child(tmp_path / "fs", load_weight=weight))
    tokens = prompt(2 * BLOCK + 40, seed=1)
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=config) as engine:
        cold = engine.generate(tokens)
        engine.generate(prompt(BLOCK, seed=2))
        engine.wait_for_stores()
        assert engine.call("fault", name="forget_states") > 0
        restored = engine.generate(tokens)
        assert restored.same_as(cold) and restored.num_cached_tokens == 2 * BLOCK
        loader = "cpu" if weight < 1 else "offloading"
        assert engine.metric("vllm:kv_connector_chosen", connector=loader) == 1
        if loader == "cpu":
            assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") == FLOAT32.num_bytes


def unnamed(**settings: Any) -> dict[str, Any]:
    """A tier of ours."""
    return {"kv_connector": "HybridOffloadConnector", "kv_connector_extra_config": settings}


def test_both_families_of_metrics_and_the_control_file_agree_on_names_that_nobody_gave(
    tiny_model: Path, tmp_path: Path
) -> None:
    store = "tests.tiers.store_tier:StoreTierSpec"
    ours = {
        "cpu": unnamed(tier="cpu", capacity_bytes="256 MiB"),
        "disk": unnamed(tier="disk", root=str(tmp_path / "one"), capacity_bytes="1 GiB"),
        "disk#2": unnamed(tier="disk", root=str(tmp_path / "two"), capacity_bytes="1 GiB"),
        store: unnamed(tier=store, shelf="top"),
        "small": unnamed(tier="cpu", capacity_bytes="64 MiB", name="small"),
    }
    third = offloading_child(tmp_path / "fs")
    del third["kv_connector_extra_config"]["name"]
    switches = tmp_path / "switches.json"
    switches.write_text('{"disk#2": {"store": false}, "OffloadingConnector": {"load": false}}')
    config = multi(*ours.values(), third, control_file=str(switches))
    config["kv_connector"] = "WeightedMultiConnector"
    del config["kv_connector_module_path"]
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=config) as engine:
        engine.generate(prompt(1300, seed=1))
        engine.wait_for_stores()
        for name in ours:
            assert engine.metric("vllm:hybrid_offload_lookups", connector=name) == 1
        assert engine.metric("vllm:hybrid_offload_lookups") == len(ours)
        for name in (*ours, "OffloadingConnector"):
            assert engine.metric("vllm:kv_connector_queries", connector=name) == 1
        assert engine.metric("vllm:kv_connector_queries") == len(ours) + 1
        assert engine.metric("vllm:hybrid_offload_stored_objects", connector="disk") > 0
        assert engine.metric("vllm:hybrid_offload_stored_objects", connector="disk#2") == 0
        assert "the children's switches are now" in engine.log
