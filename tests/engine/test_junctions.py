# SPDX-License-Identifier: Apache-2.0
"""Where states and attention part: prompts that share a prefix, and a device cache that has lost only its states."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt

pytestmark = pytest.mark.engine

CHUNK_BYTES = 64 * 2 * 2 * 32 * 2
"""64 tokens, keys and values, 2 heads of 32 dimensions in bfloat16."""


def test_siblings_find_their_shared_prefix_and_a_state_completes_local_attention(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = multi(cpu_child(), disk_child(tmp_path / "root"))
    with Engine(tiny_model, max_num_batched_tokens=4096, kv_transfer_config=config) as engine:
        for shared, found in (2400, 2368), (900, 896):
            siblings = [prompt(shared, seed=shared) + prompt(1300, seed=shared + n) for n in range(1, 6)]
            hits = []
            for tokens in siblings:
                engine.reset_device_cache()
                hits.append(engine.generate(tokens).num_cached_tokens)
            assert hits[:2] == [0, 0] and min(hits[2:]) >= found, hits

        def loaded_bytes() -> float:
            return engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu")

        tokens = prompt(2344, seed=1)
        cold = engine.generate(tokens)
        engine.reset_device_cache()
        before = loaded_bytes()
        all_loaded = engine.generate(tokens)
        with_attention = loaded_bytes() - before
        assert engine.call("fault", name="forget_states") > 0
        before = loaded_bytes()
        state_loaded = engine.generate(tokens)
        assert [cold.num_cached_tokens, all_loaded.num_cached_tokens, state_loaded.num_cached_tokens] == [0, 2304, 2304]
        assert with_attention - (loaded_bytes() - before) == 2304 // 64 * CHUNK_BYTES
        assert all_loaded.same_as(cold) and state_loaded.same_as(cold)
