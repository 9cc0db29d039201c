# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling, as on CUDA by default: vLLM plans a step before it has the last one's answers and reports.

Forced on vLLM's CPU build (tests/engine/asynchronous.py), with both of vLLM's model runners: the V2 runner is CUDA's
default, and here Triton's interpreter runs its kernels. Adapters: test_adapters.py.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Judges
from tests.engine.bar import BAR, PLAIN, UNCACHED, computed, distance
from tests.engine.client import Engine, Output, cpu_child, disk_child, multi, prompt
from tests.engine.disk_alone import counted, stored, works
from tests.engine.interpreted_triton import V2_RUNNER
from tests.engine.restore import assert_restored
from tests.engine.states import FLOAT32

pytestmark = pytest.mark.engine
V2 = pytest.param(V2_RUNNER, marks=pytest.mark.engines)
"""Under Triton's interpreter, a minute each."""

N = FLOAT32.block_size
LENGTHS = (65, 300, N - 1, N + 90, 2600)
NUM_BLOCKS = 48
"""Too few for all requests at once, so that some are preempted."""
NUM_TOKENS = 9
"""With so many, patch 0021 is needed: else loads that have ended hold all blocks."""


@pytest.fixture(params=[{}, V2], ids=["V1", "V2"])
def asynchronous(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of an engine with either runner."""
    return {**FLOAT32.arguments, **request.param, "async_scheduling": True}


def test_both_tiers_restore_what_was_computed(
    tiny_model: Path, tmp_path: Path, judges: Judges, asynchronous: dict[str, Any]
) -> None:
    plain = judges(FLOAT32, PLAIN)
    arguments = {**asynchronous, "kv_transfer_config": multi(cpu_child(), disk_child(tmp_path / "root"))}
    prompts = {length: prompt(length, seed=length) for length in LENGTHS}
    cold: dict[int, Output] = {}
    with Engine(tiny_model, **arguments) as engine:
        mode = engine.call("feature", name="mode")
        assert (mode["scheduler"], mode["num_concurrent_batches"]) == ("AsyncScheduler", 2)
        assert mode["uses_v2_runner"] == ("launcher" in asynchronous)
        for length, tokens in prompts.items():
            cold[length] = engine.generate(tokens)
            assert cold[length].num_cached_tokens == 0
            # The V2 runner takes the logarithms of probabilities otherwise.
            assert cold[length].same_as(computed(plain, tokens), tolerance=1e-5)
            assert_restored(cold[length], engine.generate(tokens), length)  # by the device
            engine.evict()
            assert_restored(cold[length], engine.generate(tokens), length)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") > 0
        assert engine.metric("vllm:hybrid_offload_hook_errors") == 0
        engine.wait_for_stores()
    with Engine(tiny_model, **arguments) as engine:
        for length, tokens in prompts.items():
            assert_restored(cold[length], engine.generate(tokens), length)
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") > 0


@pytest.mark.engines
def test_requests_at_once_that_are_preempted_are_answered_right(
    tiny_model: Path, tmp_path: Path, judges: Judges, asynchronous: dict[str, Any]
) -> None:
    """Four for each of six prefixes. Every third ends just below a block's end and decodes into the next one."""
    prompts = [
        (prompt(100 + 200 * (number % 6), seed=number % 6) + prompt(N, seed=50 + number))[: N - 1 - number % 7]
        if number % 3 == 0
        else prompt(100 + 200 * (number % 6), seed=number % 6) + prompt(40 + 37 * number, seed=50 + number)
        for number in range(24)
    ]
    config = multi(cpu_child(), disk_child(tmp_path / "root"))
    with Engine(tiny_model, **asynchronous, num_gpu_blocks_override=NUM_BLOCKS, kv_transfer_config=config) as engine:
        answers = engine.generate_many(prompts, NUM_TOKENS)
        engine.evict()
        again = engine.generate_many(prompts, NUM_TOKENS)
        engine.wait_for_stores()
        assert engine.metric("vllm:num_preemptions") > 0
        assert sum(answer.num_cached_tokens > 0 for answer in again) > len(prompts) // 2
        assert engine.metric("vllm:hybrid_offload_restored_requests") > len(prompts) // 2
        for name in ("pending_loads", "pending_stores", "hook_errors", "failed_loads"):
            assert engine.metric(f"vllm:hybrid_offload_{name}") == 0, name
    uncached = judges(FLOAT32, UNCACHED)
    for tokens, first, second in zip(prompts, answers, again, strict=True):
        assert distance(uncached, tokens, first) <= BAR
        assert second.same_as(first) or distance(uncached, tokens, second) <= BAR


@pytest.mark.engines
def test_loads_that_fail_are_computed_and_others_go_on(
    tiny_model: Path, tmp_path: Path, asynchronous: dict[str, Any]
) -> None:
    root = tmp_path / "root"
    with Engine(tiny_model, **asynchronous, max_num_seqs=1, kv_transfer_config=multi(disk_child(root))) as engine:
        works(engine, 0)
        prompts, cold = zip(*(stored(engine, seed) for seed in range(1, 6)), strict=True)
        engine.call("fault", name="disk_raises", calls=["preadv"], error="EIO")
        recomputed = engine.generate_many(list(prompts), 3)
        assert [answer.same_as(first) for answer, first in zip(recomputed, cold, strict=True)] == [True] * len(cold)
        assert counted(engine, "failed_loads") > 0
        engine.call("fault", name="disk_works", root=str(root))
        works(engine, 7)
        engine.reset_device_cache()
        assert [one.same_as(two) for one, two in zip(engine.generate_many(list(prompts), 3), cold, strict=True)] == [
            True
        ] * len(cold)
        assert counted(engine, "hook_errors") == 0
