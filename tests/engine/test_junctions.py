# SPDX-License-Identifier: Apache-2.0
"""Where states and attention part: prompts that share a prefix, and a device cache that has lost only its states."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.engine.restore import restored_bytes
from tests.engine.states import TOKEN_BYTES, States

pytestmark = [pytest.mark.engine, pytest.mark.processor]


def test_siblings_find_their_shared_prefix_and_a_state_completes_local_attention(
    tiny_model: Path, tmp_path: Path, states: States
) -> None:
    config = multi(cpu_child(), disk_child(tmp_path / "root"))
    options = {**states.arguments, "max_num_batched_tokens": 4096, "kv_transfer_config": config}
    with Engine(tiny_model, **options) as engine:
        for shared, found in (2400, 2368), (900, 896):
            siblings = [prompt(shared, seed=shared) + prompt(1300, seed=shared + n) for n in range(1, 6)]
            hits = []
            for tokens in siblings:
                engine.reset_device_cache()
                hits.append(engine.generate(tokens).num_cached_tokens)
            assert hits[:2] == [0, 0] and min(hits[2:]) >= found, hits

        def loaded_bytes() -> float:
            return engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu")

        local = 2 * states.block_size  # what the device keeps of the attention, in whole blocks
        tokens = prompt(local + 40, seed=1)
        cold = engine.generate(tokens)
        engine.reset_device_cache()
        before = loaded_bytes()
        all_loaded = engine.generate(tokens)
        with_attention = loaded_bytes() - before
        assert engine.call("fault", name="forget_states") > 0
        before = loaded_bytes()
        state_loaded = engine.generate(tokens)
        assert [answer.num_cached_tokens for answer in (cold, all_loaded, state_loaded)] == [0, local, local]
        assert with_attention == restored_bytes(states, len(tokens)) == local * TOKEN_BYTES + states.num_bytes
        assert loaded_bytes() - before == states.num_bytes
        assert all_loaded.same_as(cold) and state_loaded.same_as(cold)
