# SPDX-License-Identifier: Apache-2.0
"""Seeded parts of the fault matrix and of the churn, whose whole is ``make test SUITE=faults``, and two ranks."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.engine.binding import BINDING
from tests.engine.client import Engine, cpu_child, multi, prompt
from tests.multi_connector import matrix
from tests.multi_connector.fakes import public_hooks
from tests.multi_connector.faulty import AT_RETURN, KINDS, FaultyHybridOffloadConnector, FaultyOffloadingConnector
from tests.python_path import REPOSITORY, python_path
from tests.warm import WarmProcess

SEED = 4
CELLS = 20
REQUESTS = 60


def run(module: str, model: Path, log: Path, *arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The program's total, and its cells."""
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "TORCHDYNAMO_DISABLE": "1",
    }
    with WarmProcess(
        ["-m", f"tests.multi_connector.{module}", str(model), *arguments], environment, REPOSITORY, log
    ) as process:
        lines = process.stdout.read().splitlines()
    totals = [json.loads(line.removeprefix("TOTAL ")) for line in lines if line.startswith("TOTAL ")]
    assert totals, log.read_text(errors="replace")[-6000:]
    return totals[0], [json.loads(line.removeprefix("CELL ")) for line in lines if line.startswith("CELL ")]


@pytest.mark.faults
@pytest.mark.engine
def test_whatever_a_child_does_requests_are_right_and_the_child_comes_back(tiny_model: Path, tmp_path: Path) -> None:
    total, cells = run("matrix", tiny_model, tmp_path / "log", "--cells", str(CELLS), "--seed", str(SEED))
    assert [cell for cell in cells if cell["wrong"]] == []
    assert total["cells"] == CELLS
    assert total["fired"] >= CELLS // 3
    assert total["left"] == {"scheduler": 0, "worker": 0, "blocks": 0}


@pytest.mark.faults
@pytest.mark.engine
def test_random_aborts_preemptions_and_faults_leave_nothing(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    total, _ = run("churn", tiny_model, log, "--requests", str(REQUESTS), "--seed", str(SEED))
    assert total["finished"] + total["aborted"] == total["started"] >= REQUESTS
    assert total["aborted"] and total["faults"] and total["returns"]
    assert total["isolations"] == total["returns"]  # it serves at the end
    assert not any(total["left"].values()), (total, log.read_text(errors="replace")[-4000:])


def test_the_matrix_has_every_hook_of_the_interface() -> None:
    instance_level = {name for name, member in public_hooks().items() if not isinstance(member, classmethod)}
    assert {hook for hook, _, _ in matrix.cells()} == instance_level | {"__init__"}
    assert len(matrix.cells()) == (len(instance_level) + 1) * len(KINDS) * 2
    for faulty in (FaultyHybridOffloadConnector, FaultyOffloadingConnector):
        assert all(name in faulty.__dict__ for name in instance_level - {"role"})
    assert set(matrix.NOT_CALLED) <= instance_level and set(AT_RETURN) <= instance_level | {"__init__"}


@pytest.mark.faults
@pytest.mark.engine
def test_a_synchronous_load_that_fails_halfway_is_computed_on_a_model_with_several_groups(
    tiny_model: Path, tmp_path: Path
) -> None:
    total, cells = run("synchronous", tiny_model, tmp_path / "log")
    assert [cell for cell in cells if cell["wrong"]] == []
    assert total["fired"] == total["cells"] == 12
    assert total["left"] == {"scheduler": 0, "blocks": 0}


@pytest.mark.engine
def test_what_was_computed_from_a_third_partys_failed_load_is_neither_answered_nor_kept(
    tiny_model: Path, tmp_path: Path
) -> None:
    total, cells = run("synchronous", tiny_model, tmp_path / "log", "--beside-tier")
    assert [cell for cell in cells if cell["wrong"]] == []
    assert total == {"cells": 3, "fired": 0, "left": {"scheduler": 0, "blocks": 0}}


@pytest.mark.faults
@pytest.mark.engine
def test_a_child_that_fails_on_one_rank_leaves_all_and_comes_back_on_all(tiny_model: Path, tmp_path: Path) -> None:
    fault = tmp_path / "fault.json"
    environment = {**BINDING, "FAULT_FILE": str(fault)}
    config = multi(matrix.CHILDREN["ours"], cpu_child(name="steady"), retry_first_s=0.05)
    with Engine(tiny_model, environment, tensor_parallel_size=2, kv_transfer_config=config) as engine:

        def counted(what: str) -> float:
            return engine.metric(f"vllm:kv_connector_{what}", connector="faulty")

        tokens = prompt(matrix.LENGTH, seed=1)
        cold = engine.generate(tokens, salts=["first"])
        engine.wait_for_stores()
        engine.reset_device_cache()
        assert engine.generate(tokens, salts=["first"]).num_cached_tokens >= matrix.RESTORABLE
        assert counted("chosen") == 1

        beside = tmp_path / "beside"
        beside.write_text(json.dumps({"hook": "start_load_kv", "kind": "raises", "role": "worker", "rank": 1}))
        os.replace(beside, fault)
        for _ in range(2):
            engine.reset_device_cache()
            under_fault = engine.generate(tokens, salts=["first"])
            assert under_fault.same_as(cold)
            assert under_fault.num_cached_tokens >= matrix.RESTORABLE
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
        assert restored.num_cached_tokens >= matrix.RESTORABLE
        assert counted("chosen") == chosen + 1
