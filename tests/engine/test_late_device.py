# SPDX-License-Identifier: Apache-2.0
"""A real engine whose copies end late, through the code that copies on a GPU: restored equals computed, exactly."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.engine.restore import assert_restored, assert_restored_in_a_batch
from tests.engine.states import States

pytestmark = [pytest.mark.engine, pytest.mark.engines]

LENGTHS = (65, 640, 1153, 2305, 3900)


def late(child: dict[str, Any]) -> dict[str, Any]:
    return child | {"kv_connector": "LateDeviceConnector", "kv_connector_module_path": "tests.engine.late_device"}


def test_restores_equal_the_cold_run_though_copies_end_late(tiny_model: Path, tmp_path: Path, states: States) -> None:
    """From the CPU tier, with all prompts at once, and after a restart from disk."""
    config = multi(late(cpu_child()), late(disk_child(tmp_path / "root")))
    options = {**states.arguments, "max_num_batched_tokens": 2304, "kv_transfer_config": config}
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    with Engine(tiny_model, **options) as engine:
        cold = [engine.generate(tokens) for tokens in prompts]
        engine.evict()
        for length, output, again in zip(LENGTHS, cold, engine.generate_many(prompts), strict=True):
            assert_restored_in_a_batch(output, again, length)
        assert engine.metric("vllm:hybrid_offload_dropped_stores") == 0
        assert engine.metric("vllm:hybrid_offload_hook_errors") == 0
        engine.wait_for_stores()
    with Engine(tiny_model, **options) as engine:
        for length, output, tokens in zip(LENGTHS, cold, prompts, strict=True):
            assert_restored(output, engine.generate(tokens), length)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") > 0


def test_a_full_device_buffer_drops_stores_and_answers_stay_right(tiny_model: Path, states: States) -> None:
    """It holds one snapshot and not two."""
    child = late(cpu_child(device_buffer_bytes=states.num_bytes * 3 // 2))
    with Engine(tiny_model, **states.arguments, kv_transfer_config=multi(child)) as engine:
        prompts = [prompt(length, seed=length) for length in LENGTHS]
        cold = [engine.generate(tokens) for tokens in prompts]
        for output, tokens in zip(cold, prompts, strict=True):
            engine.reset_device_cache()
            assert engine.generate(tokens).same_as(output)
        assert engine.metric("vllm:hybrid_offload_dropped_stores", reason="transfer_full") > 0
