# SPDX-License-Identifier: Apache-2.0
"""Without a prefix cache vLLM keeps states in mode ``none``: a request's state ends with it, so nothing is restored."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt

pytestmark = [pytest.mark.engine, pytest.mark.engines]

WITHOUT_STATES = {"enable_prefix_caching": False, "prefix_match_unit": None}
STORED = "vllm:hybrid_offload_stored_bytes"


def test_an_engine_whose_states_end_with_their_requests_serves_as_without_a_connector(
    tiny_model: Path, tmp_path: Path
) -> None:
    prompts = [prompt(130, seed=1), prompt(2500, seed=2)]
    with Engine(tiny_model, **WITHOUT_STATES) as engine:
        cold = [engine.generate(tokens) for tokens in prompts]
    lab = {"kv_connector": "LabConnector", "kv_connector_module_path": "tests.patches.lab", "kv_role": "kv_both"}
    children = (cpu_child(), disk_child(tmp_path / "root"), lab)
    with Engine(tiny_model, **WITHOUT_STATES, kv_transfer_config=multi(*children)) as engine:
        for _ in range(2):
            answers = [engine.generate(tokens) for tokens in prompts]
            engine.wait_for_stores()
            for answer, expected in zip(answers, cold, strict=True):
                assert answer.num_cached_tokens == 0
                assert answer.same_as(expected)
        assert engine.metric(STORED) == 0
        for name in ("cpu", "disk"):
            lines = [line for line in engine.log.splitlines() if f"{name}: nothing is stored or restored" in line]
            assert len(lines) == 1
            assert "--enable-prefix-caching --mamba-cache-mode align" in lines[0]
    assert not (tmp_path / "root").exists()
