# SPDX-License-Identifier: Apache-2.0
"""Out of service and back across processes: two ranks, of which one has a child that fails."""

import json
import os
from pathlib import Path

import pytest

from tests.engine.binding import BINDING
from tests.engine.client import Engine, cpu_child, multi, prompt
from tests.multi_connector.matrix import CHILDREN

LENGTH, RESTORABLE = 200, 192


@pytest.mark.faults
@pytest.mark.engine
def test_a_child_that_fails_on_one_rank_leaves_all_and_comes_back_on_all(tiny_model: Path, tmp_path: Path) -> None:
    fault = tmp_path / "fault.json"
    environment = {**BINDING, "FAULT_FILE": str(fault)}
    config = multi(CHILDREN["ours"], cpu_child(name="steady"), retry_first_s=0.05)
    with Engine(tiny_model, environment, tensor_parallel_size=2, kv_transfer_config=config) as engine:

        def counted(what: str) -> float:
            return engine.metric(f"vllm:kv_connector_{what}", connector="faulty")

        tokens = prompt(LENGTH, seed=1)
        cold = engine.generate(tokens, salts=["first"])
        engine.wait_for_stores()
        engine.reset_device_cache()
        assert engine.generate(tokens, salts=["first"]).num_cached_tokens >= RESTORABLE
        assert counted("chosen") == 1

        beside = tmp_path / "beside"
        beside.write_text(json.dumps({"hook": "start_load_kv", "kind": "raises", "role": "worker", "rank": 1}))
        os.replace(beside, fault)
        for _ in range(2):
            engine.reset_device_cache()
            under_fault = engine.generate(tokens, salts=["first"])
            assert under_fault.same_as(cold)
            assert under_fault.num_cached_tokens >= RESTORABLE
        assert counted("isolations") >= 1

        fault.unlink()
        for number in range(60):
            assert engine.generate(tokens, salts=[f"meanwhile {number}"]).same_as(cold)
            if engine.metric("vllm:kv_connector_state", connector="faulty") == 0:
                break
        assert counted("returns") == counted("isolations") >= 1  # incidents, not processes
        chosen = counted("chosen")
        assert engine.generate(tokens, salts=["last"]).same_as(cold)
        engine.wait_for_stores()
        engine.reset_device_cache()
        restored = engine.generate(tokens, salts=["last"])
        assert restored.same_as(cold)
        assert restored.num_cached_tokens >= RESTORABLE
        assert counted("chosen") == chosen + 1
