# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: an object exists when every rank has it, and belongs to that number of ranks."""

import os
from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.engine.test_restore import N, assert_restored

pytestmark = pytest.mark.engine

LENGTHS = (300, N + 1, 3000)
BINDING = {"VLLM_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0"}
"""vLLM binds ranks to NUMA nodes; a machine with one node must say which core is whose."""


def test_two_ranks_restore_from_both_tiers_and_one_rank_never_loads_their_objects(
    tiny_model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    config = multi(cpu_child(), disk_child(root))
    two_ranks = {"tensor_parallel_size": 2, "kv_transfer_config": config}
    prompts = {length: prompt(length, seed=length) for length in LENGTHS}

    with Engine(tiny_model, BINDING, **two_ranks) as engine:
        cold = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        engine.wait_for_stores()
        engine.reset_device_cache()
        for length, tokens in prompts.items():
            assert_restored(cold[length], engine.generate(tokens), length)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") > 0
        engine.wait_for_stores()
    assert {path.suffix for path in root.rglob("*.r[0-9]")} == {".r0", ".r1"}

    with Engine(tiny_model, BINDING, **two_ranks) as engine:
        for length, tokens in prompts.items():
            assert_restored(cold[length], engine.generate(tokens), length)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") > 0

    with Engine(tiny_model, kv_transfer_config=multi(disk_child(root))) as engine:
        for tokens in prompts.values():
            assert engine.generate(tokens).num_cached_tokens == 0
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") == 0


def test_an_object_that_one_rank_lacks_is_not_there(tiny_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    options = {"tensor_parallel_size": 2, "kv_transfer_config": multi(disk_child(root))}
    tokens = prompt(N + 10, seed=1)
    with Engine(tiny_model, BINDING, **options) as engine:
        cold = engine.generate(tokens)
        engine.wait_for_stores()
    snapshots = list(root.rglob("*.s.r1"))
    assert snapshots
    for path in snapshots:
        path.unlink()
    with Engine(tiny_model, BINDING, **options) as engine:
        recomputed = engine.generate(tokens)
    assert recomputed.num_cached_tokens == 0
    assert recomputed.same_as(cold)
