# SPDX-License-Identifier: Apache-2.0
"""Faults inside our connector cost a recomputation at most: the engine lives, the output is equal, it is counted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.engine.restore import assert_restored
from tests.engine.states import FLOAT32

pytestmark = pytest.mark.engine

LENGTH = FLOAT32.block_size + 10


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    """One engine with a CPU tier."""
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=multi(cpu_child())) as running:
        yield running


def counted(engine: Engine, name: str, **labels: str) -> float:
    return engine.metric(f"vllm:hybrid_offload_{name}", connector="cpu", **labels)


@pytest.mark.parametrize(("name", "reason"), [("set_loads_broken", "injected"), ("set_loads_silent", "timeout")])
def test_a_request_whose_loads_keep_failing_or_never_end_is_computed_after_three(
    engine: Engine, name: str, reason: str
) -> None:
    tokens = prompt(LENGTH, seed=len(reason))
    cold = engine.generate(tokens)
    engine.reset_device_cache()
    engine.call("fault", name=name, on=True)
    try:
        assert engine.generate(tokens).same_as(cold)
    finally:
        engine.call("fault", name=name, on=False)
    assert counted(engine, "failed_loads", reason=reason) == 3
    engine.reset_device_cache()
    assert_restored(cold, engine.generate(tokens), LENGTH)


@pytest.mark.parametrize(
    ("half", "hook"),
    [
        ("scheduler", "lookup"),
        ("scheduler", "allocated"),
        ("scheduler", "plan_stores"),
        ("scheduler", "update"),
        ("scheduler", "finished"),
        ("worker", "begin_loads"),
        ("worker", "start_loads"),
        ("worker", "store"),
        ("worker", "take_metadata"),
    ],
)
def test_an_exception_in_a_hook_does_not_reach_the_engine(engine: Engine, half: str, hook: str) -> None:
    tokens = prompt(LENGTH, seed=sum(hook.encode()))
    cold = engine.generate(tokens)
    engine.reset_device_cache()
    errors = counted(engine, "hook_errors")
    engine.call("fault", name="set_hook_broken", half=half, hook=hook, on=True)
    try:
        assert engine.generate(tokens).same_as(cold)
        assert engine.generate(prompt(LENGTH, seed=3), max_tokens=2).num_cached_tokens == 0
        engine.reset_device_cache()
    finally:
        engine.call("fault", name="set_hook_broken", half=half, hook=hook, on=False)
    assert counted(engine, "hook_errors") > errors
    engine.generate(tokens)
    engine.reset_device_cache()
    assert_restored(cold, engine.generate(tokens), LENGTH)
    engine.call("reset_everything")


def test_a_gather_that_fails_gives_every_ticket_and_buffer_back(engine: Engine) -> None:
    engine.call("fault", name="set_gather_broken", on=True)
    try:
        engine.generate(prompt(LENGTH, seed=4))
    finally:
        engine.call("fault", name="set_gather_broken", on=False)
    engine.wait_for_stores()
    assert counted(engine, "dropped_stores", reason="hook_error") > 0
    tokens = prompt(LENGTH, seed=5)
    cold = engine.generate(tokens)
    engine.reset_device_cache()
    assert_restored(cold, engine.generate(tokens), LENGTH)


def test_a_child_that_fails_leaves_the_next_its_turn(tiny_model: Path, tmp_path: Path) -> None:
    config = multi(cpu_child(), disk_child(tmp_path / "root"))
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=config) as engine:
        tokens = prompt(LENGTH, seed=6)
        cold = engine.generate(tokens)
        engine.evict()
        engine.call("fault", name="set_loads_broken", on=True)
        assert_restored(cold, engine.generate(tokens), LENGTH)
        assert counted(engine, "failed_loads", reason="injected") == 3
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") > 0
