# SPDX-License-Identifier: Apache-2.0
"""Other chunk sizes, other match units, long prompts."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.engine.restore import assert_restored
from tests.engine.states import BFLOAT16, FLOAT32, States
from tools.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine


@pytest.mark.processor
def test_chunks_of_a_whole_block_restore_at_every_match_unit(tiny_model: Path, tmp_path: Path, states: States) -> None:
    """The disk tier's own choice: here a chunk is N tokens, and snapshots carry up to N - 64 tokens of attention."""
    config = multi(disk_child(tmp_path / "root", hybrid_chunk_size="auto"))
    n = states.block_size
    prompts = {length: prompt(length, seed=length) for length in (65, n // 2, 640, n + 1, n + 100, 3000)}
    with Engine(tiny_model, **states.arguments, kv_transfer_config=config) as engine:
        assert f"chunks of {n} tokens" in engine.log
        cold = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        engine.wait_for_stores()
    with Engine(tiny_model, **states.arguments, kv_transfer_config=config) as engine:
        for length, tokens in prompts.items():
            assert_restored(cold[length], engine.generate(tokens), length)
        longer = prompts[3000] + prompt(50, seed=1)
        engine.reset_device_cache()
        assert engine.generate(longer).num_cached_tokens >= 2944


@pytest.mark.engines
@pytest.mark.processor
@pytest.mark.parametrize(("states", "unit"), [(FLOAT32, 48), (FLOAT32, 32), (BFLOAT16, 32)], ids=str)
def test_a_match_unit_off_the_kernels_grid_restores_what_the_device_cache_would(
    tiny_model: Path, states: States, unit: int
) -> None:
    """There a cold run may differ in the last bits; a device-cache hit with the same split may not."""
    config = multi(cpu_child(hybrid_chunk_size="auto"))
    options = {**states.arguments, "prefix_match_unit": unit, "kv_transfer_config": config}
    with Engine(tiny_model, **options) as engine:
        assert "restores are not bit-exact with GDN kernels" in engine.log
        for length in (300, 1000, states.block_size + 1, 2500):
            tokens = prompt(length, seed=length)
            engine.generate(tokens)
            by_device = engine.generate(tokens)
            engine.reset_device_cache()
            restored = engine.generate(tokens)
            assert restored.num_cached_tokens == by_device.num_cached_tokens == (length - 1) // unit * unit
            assert restored.same_as(by_device)


@pytest.mark.engines
def test_a_second_process_restores_a_prompt_of_17435_tokens_from_disk(tmp_path: Path) -> None:
    num_tokens = 17_435
    model = make_tiny_model(tmp_path / "long", context_tokens=20_480)
    config = multi(disk_child(tmp_path / "root"))
    options = {"max_model_len": 20_480, "max_num_batched_tokens": 8192, "kv_transfer_config": config}
    tokens = prompt(num_tokens, seed=1)
    with Engine(model, **options) as engine:
        cold = engine.generate(tokens)
        engine.wait_for_stores()
    with Engine(model, **options) as engine:
        restored = engine.generate(tokens)
        assert_restored(cold, restored, num_tokens)
        assert restored.num_cached_tokens >= 0.99 * num_tokens
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") > 0


@pytest.mark.engines
def test_a_model_of_another_weight_value_never_sees_the_objects(tiny_model: Path, tmp_path: Path) -> None:
    """Same name, same shapes, one weight of one value: another fingerprint."""
    config = multi(disk_child(tmp_path / "root"))
    tokens = prompt(2000, seed=1)
    with Engine(tiny_model, kv_transfer_config=config) as engine:
        engine.generate(tokens)
        engine.wait_for_stores()
    nudged = make_tiny_model(tmp_path / "other" / tiny_model.name, nudge=0.125)
    with Engine(nudged, kv_transfer_config=config) as engine:
        assert engine.generate(tokens).num_cached_tokens == 0
