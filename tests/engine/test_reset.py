# SPDX-License-Identifier: Apache-2.0
"""Weights that change while the engine runs: after the reset nothing of before is restored, and a restart is right."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.engine.restore import assert_restored
from tests.engine.states import FLOAT32

pytestmark = pytest.mark.engine

LENGTH = FLOAT32.block_size + 10


def test_new_weights_and_a_reset_and_a_restart_with_the_old_ones(tiny_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    tokens = prompt(LENGTH, seed=1)
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=multi(cpu_child(), disk_child(root))) as engine:
        cold = engine.generate(tokens)
        engine.evict()
        engine.call("fault", name="change_weights")
        outdated = engine.generate(tokens)
        assert outdated.num_cached_tokens >= LENGTH - 10  # what goes wrong without a reset
        engine.call("reset_everything")

        new_cold = engine.generate(tokens)
        assert new_cold.num_cached_tokens == 0
        assert not new_cold.same_as(cold)
        assert not new_cold.same_as(outdated)
        engine.wait_for_stores()
        for _ in range(2):
            engine.reset_device_cache()
            assert_restored(new_cold, engine.generate(tokens), LENGTH)
        assert engine.metric("vllm:hybrid_offload_hook_errors", connector="disk") == 0

    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=multi(disk_child(root))) as engine:
        assert_restored(cold, engine.generate(tokens), LENGTH)
        engine.reset_device_cache()
        engine.call("fault", name="change_weights")
        engine.call("reset_everything")
        assert engine.generate(tokens).same_as(new_cold)
        engine.evict()
        assert_restored(new_cold, engine.generate(tokens), LENGTH)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") > 0
