# SPDX-License-Identifier: Apache-2.0
"""A tier that this package has never heard of, in a real engine: its store answers in batches, about names alone."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, multi, prompt
from tests.engine.restore import U, assert_restored

pytestmark = pytest.mark.engine

LENGTH = 1157


def test_a_tier_by_module_path_restores_what_was_computed(tiny_model: Path) -> None:
    tier = {"tier": "tests.tiers.store_tier:StoreTierSpec", "shelf": "top", "capacity_bytes": "64 MiB"}
    child = cpu_child()
    child["kv_connector_extra_config"] = {"name": "store", "hybrid_chunk_size": 64, **tier}
    with Engine(tiny_model, kv_transfer_config=multi(child)) as engine:
        tokens = prompt(LENGTH, seed=1)
        cold = engine.generate(tokens)
        engine.wait_for_stores()
        for _ in range(2):
            engine.reset_device_cache()
            assert_restored(cold, engine.generate(tokens), LENGTH)
        longer = tokens + prompt(300, seed=2)
        engine.reset_device_cache()
        assert engine.generate(longer).num_cached_tokens >= (LENGTH - 1) // U * U
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="store") > 0
        assert engine.metric("vllm:hybrid_offload_hook_errors", connector="store") == 0
