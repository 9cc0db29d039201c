# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: an object exists when every rank has it, and belongs to that number of ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.binding import BINDING
from tests.engine.client import Engine, EngineError, Output, cpu_child, disk_child, multi, prompt
from tests.engine.restore import assert_restored
from tests.engine.states import FLOAT32
from tests.tiers.disk.files import object_files, snapshot_files
from tools.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

N = FLOAT32.block_size

LENGTHS = (300, N + 1, 3000)


@dataclass(frozen=True)
class FirstLife:
    """What an engine of two ranks has answered and left on disk. Rank 1 has lost the states of ``halved``."""

    root: Path
    cold: dict[int, Output]
    halved: list[int]
    halved_cold: Output


def two_ranks(model: Path, root: Path) -> Engine:
    config = multi(cpu_child(), disk_child(root))
    return Engine(model, BINDING, tensor_parallel_size=2, **FLOAT32.arguments, kv_transfer_config=config)


@pytest.fixture(scope="module")
def first(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> FirstLife:
    root = tmp_path_factory.mktemp("parallel") / "root"
    halved = prompt(N + 10, seed=1)
    with two_ranks(tiny_model, root) as engine:
        cold = {length: engine.generate(prompt(length, seed=length)) for length in LENGTHS}
        engine.evict()
        for length in LENGTHS:
            assert_restored(cold[length], engine.generate(prompt(length, seed=length)), length)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") > 0
        engine.wait_for_stores()
        before = set(object_files(root))
        halved_cold = engine.generate(halved)
        engine.wait_for_stores()
    snapshots = snapshot_files(root, rank=1) - before
    assert snapshots
    for path in snapshots:
        path.unlink()
    return FirstLife(root, cold, halved, halved_cold)


@pytest.fixture(scope="module")
def second(tiny_model: Path, first: FirstLife) -> Iterator[Engine]:
    """The same engine again, on the same root."""
    with two_ranks(tiny_model, first.root) as engine:
        yield engine


def test_two_ranks_restore_from_both_tiers_and_one_rank_never_loads_their_objects(
    tiny_model: Path, first: FirstLife, second: Engine
) -> None:
    assert {path.suffix for path in first.root.rglob("*.r[0-9]")} == {".r0", ".r1"}
    for length in LENGTHS:
        assert_restored(first.cold[length], second.generate(prompt(length, seed=length)), length)
    assert second.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") > 0
    counted = {
        name: second.metric(f"vllm:hybrid_offload_{name}", connector=tier)
        for tier, name in (("disk", "load_seconds"), ("disk", "restored_requests"), ("cpu", "store_seconds"))
    }
    assert counted["load_seconds"] == counted["restored_requests"] == len(LENGTHS)  # of both ranks together
    assert counted["store_seconds"] == second.metric("vllm:hybrid_offload_stored_objects", connector="cpu") > 0

    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=multi(disk_child(first.root))) as engine:
        for length in LENGTHS:
            assert engine.generate(prompt(length, seed=length)).num_cached_tokens == 0
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") == 0


@pytest.mark.engines
def test_an_object_that_one_rank_lacks_is_not_there(first: FirstLife, second: Engine) -> None:
    recomputed = second.generate(first.halved)
    assert recomputed.num_cached_tokens == 0
    assert recomputed.same_as(first.halved_cold)


@pytest.mark.engines
def test_pipeline_parallelism_is_refused_at_start(tmp_path: Path) -> None:
    """With attention in both stages: else vLLM's stages disagree on the layout of the KV cache before we are built."""
    model = make_tiny_model(tmp_path / "model", num_layers=8)
    config = multi(cpu_child(), disk_child(tmp_path / "root"))
    engine = Engine(model, BINDING, pipeline_parallel_size=2, **FLOAT32.arguments, kv_transfer_config=config)
    with pytest.raises(EngineError, match="pipeline parallelism yet: set --pipeline-parallel-size 1"), engine:
        pass
    assert not (tmp_path / "root").exists()
