# SPDX-License-Identifier: Apache-2.0
"""A device cache that has lost only its states, over a tier of ours beside vLLM's OffloadingConnector."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, multi, prompt
from tests.engine.states import FLOAT32
from tests.multi_connector.test_third_party import BLOCK, offloading_child

pytestmark = [pytest.mark.engine, pytest.mark.engines]


@pytest.mark.parametrize("weight", [0.1, 10.0], ids=["ours-loads", "third-party-loads"])
def test_local_attention_is_left_out_by_the_child_that_can_and_loaded_by_the_one_that_cannot(
    tiny_model: Path, tmp_path: Path, weight: float
) -> None:
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
