# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H: Mamba2, attention and MLP in layers of their own. Its states are float32 on every processor."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.models.families import make_nemotron_h

pytestmark = pytest.mark.engine

LENGTHS = (65, 130, 642, 1153, 2945)
"""A few tokens after a restore point, below and above a block (640 tokens)."""
U = 64


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_nemotron_h(tmp_path_factory.mktemp("models") / "nemotron")


def test_mamba2_is_restored_exactly_from_cpu_and_after_a_restart_from_disk(nemotron: Path, tmp_path: Path) -> None:
    config = multi(cpu_child(), disk_child(tmp_path / "root"))
    prompts = {length: prompt(length, seed=length) for length in LENGTHS}
    with Engine(nemotron, kv_transfer_config=config) as engine:
        cold = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        by_device = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        engine.wait_for_stores()
        engine.reset_device_cache()
        from_cpu = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") > 0
    with Engine(nemotron, kv_transfer_config=config) as engine:
        from_disk = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") > 0
    for length in LENGTHS:
        assert cold[length].num_cached_tokens == 0
        for restored in (by_device[length], from_cpu[length], from_disk[length]):
            assert restored.num_cached_tokens == (length - 1) // U * U
            assert restored.same_as(cold[length]), (length, cold[length], restored)


@pytest.mark.engines
def test_a_zeroed_state_and_a_zeroed_chunk_of_attention_change_the_answer(nemotron: Path) -> None:
    with Engine(nemotron, kv_transfer_config=multi(cpu_child())) as engine:
        tokens = prompt(130, seed=1)
        for fault in ({"name": "zero_snapshot"}, {"name": "zero_chunk", "position": 0}):
            engine.call("reset_everything")
            cold = engine.generate(tokens)
            engine.wait_for_stores()
            engine.reset_device_cache()
            engine.call("fault", **fault)
            restored = engine.generate(tokens)
            assert restored.num_cached_tokens == 128
            assert not restored.same_as(cold, tolerance=0.1), fault
