# SPDX-License-Identifier: Apache-2.0
"""The comparisons of test_restore.py and the bar for concurrent requests can fail: every injected fault is seen."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Judges
from tests.engine.bar import BAR, UNCACHED, distance
from tests.engine.client import Engine, Output, cpu_child, prompt
from tests.engine.states import FLOAT32, States

pytestmark = [pytest.mark.engine, pytest.mark.faults]

N = FLOAT32.block_size
LENGTH = 2 * N + 10
"""With bfloat16 states, in other blocks, a restore point inside one."""


@pytest.fixture(scope="module")
def engine(tiny_model: Path, states: States) -> Iterator[Engine]:
    """One engine with a CPU tier and nothing around it; every test uses prompts of its own and an empty tier."""
    child = cpu_child()
    child["kv_connector_module_path"] = "vllm_overlay.connector.connector"
    with Engine(tiny_model, **states.arguments, kv_transfer_config=child) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty_tier(engine: Engine) -> None:
    engine.call("reset_everything")


def stored(engine: Engine, seed: int, num_tokens: int = LENGTH) -> tuple[list[int], Output]:
    """A prompt, its cold output, and the tier filled with it; the device cache is empty."""
    tokens = prompt(num_tokens, seed)
    cold = engine.generate(tokens)
    engine.reset_device_cache()
    return tokens, cold


def test_without_a_fault_the_restored_output_is_equal(engine: Engine) -> None:
    tokens, cold = stored(engine, seed=1)
    restored = engine.generate(tokens)
    assert restored.num_cached_tokens == 2 * N
    assert restored.same_as(cold)


@pytest.mark.parametrize(("kind", "position"), [("s", -1), ("f0", 0), ("f0", 17), ("f0", 35)])
def test_a_zeroed_snapshot_or_attention_chunk_changes_the_output(engine: Engine, kind: str, position: int) -> None:
    tokens, cold = stored(engine, seed=11 + position)
    engine.call("fault", name="zero", kind=kind, position=position)
    restored = engine.generate(tokens)
    assert restored.num_cached_tokens == 2 * N
    assert not restored.same_as(cold)


def test_an_attention_chunk_swapped_with_another_prompts_changes_the_output(engine: Engine) -> None:
    stored(engine, seed=33)
    tokens, cold = stored(engine, seed=3)
    engine.call("fault", name="swap_chunks", position=7)
    assert not engine.generate(tokens).same_as(cold)


def test_the_snapshot_of_a_boundary_one_chunk_off_changes_the_output(engine: Engine) -> None:
    tokens, cold = stored(engine, seed=4)
    engine.generate(tokens[: LENGTH - 64])
    engine.call("fault", name="copy_snapshot", source=2 * N - 64, target=2 * N)
    engine.reset_device_cache()
    restored = engine.generate(tokens)
    assert restored.num_cached_tokens == 2 * N
    assert not restored.same_as(cold)


def test_the_snapshot_of_another_prompt_changes_the_output(engine: Engine) -> None:
    stored(engine, seed=5, num_tokens=N + 10)
    tokens, cold = stored(engine, seed=6)
    engine.call("fault", name="copy_snapshot", source=N, target=2 * N)
    assert not engine.generate(tokens).same_as(cold)


def test_garbage_left_in_a_loaded_page_changes_the_output_and_clearing_it_does_not(engine: Engine) -> None:
    length = 2 * N - 54
    tokens, cold = stored(engine, seed=7, num_tokens=length)
    engine.call("fault", name="garbage_in_free_blocks")
    cleared = engine.generate(tokens)
    assert cleared.num_cached_tokens == 2 * N - 64
    assert cleared.same_as(cold)
    assert engine.generate(tokens).same_as(cold)
    extended = engine.generate(tokens + prompt(1000, seed=8))
    engine.reset_device_cache()
    engine.call("fault", name="garbage_in_free_blocks")
    assert engine.generate(tokens + prompt(1000, seed=8)).same_as(extended)

    engine.reset_device_cache()
    engine.call("fault", name="garbage_in_free_blocks")
    engine.call("fault", name="set_clearing", on=False)
    try:
        left = engine.generate(tokens)
    finally:
        engine.call("fault", name="set_clearing", on=True)
    assert not left.same_as(cold)


def test_a_slot_of_another_generation_is_never_loaded_and_the_request_recomputes(engine: Engine) -> None:
    tokens, cold = stored(engine, seed=9)
    engine.call("fault", name="retag")
    failed_before = engine.metric("vllm:hybrid_offload_failed_loads", connector="cpu")
    recomputed = engine.generate(tokens)
    assert recomputed.same_as(cold)
    assert engine.metric("vllm:hybrid_offload_failed_loads", connector="cpu") == failed_before + 1


def test_the_bar_for_concurrent_requests_sees_faults_too(engine: Engine, states: States, judges: Judges) -> None:
    restored = []
    for seed, zeroed in enumerate([{}, {"kind": "s"}, {"kind": "f0", "position": 3}], start=50):
        tokens, _ = stored(engine, seed, num_tokens=N + 10)
        if zeroed:
            engine.call("fault", name="zero", **zeroed)
        restored.append((tokens, engine.generate(tokens, 16)))
        engine.call("reset_everything")
    distances = [distance(judges(states, UNCACHED), tokens, output) for tokens, output in restored]
    assert distances[0] <= BAR < min(distances[1:])
