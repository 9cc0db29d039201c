# SPDX-License-Identifier: Apache-2.0
"""Attention chunks on disk outlive the block size they were computed with; snapshots are raw pages and do not."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.client import Engine, disk_child, multi, prompt
from tests.engine.restore import assert_restored
from tests.engine.states import States

pytestmark = [pytest.mark.engine, pytest.mark.engines]


def test_chunks_written_under_one_block_size_are_loaded_under_another(
    tiny_model: Path, tmp_path: Path, states: States
) -> None:
    config = multi(disk_child(tmp_path / "root"))
    num_chunks = states.block_size // 64
    length = states.block_size + 10
    tokens = prompt(length, seed=1)
    with Engine(tiny_model, **states.arguments, kv_transfer_config=config) as engine:
        cold = engine.generate(tokens)
        engine.wait_for_stores()
        assert engine.metric("vllm:hybrid_offload_stored_objects", connector="disk") >= num_chunks + 1
    doubled = replace(states, block_size=2 * states.block_size)
    with Engine(tiny_model, **doubled.arguments, kv_transfer_config=config) as engine:
        recomputed = engine.generate(tokens)
        assert recomputed.num_cached_tokens == 0
        assert recomputed.same_as(cold)
        assert engine.metric("vllm:hybrid_offload_lookup_limits", connector="disk", reason="state") >= 1
        engine.wait_for_stores()
        assert 1 <= engine.metric("vllm:hybrid_offload_stored_objects", connector="disk") <= 2  # snapshots alone
        engine.reset_device_cache()
        assert_restored(cold, engine.generate(tokens), length)
        assert engine.metric("vllm:hybrid_offload_loaded_objects", connector="disk") >= num_chunks + 1
