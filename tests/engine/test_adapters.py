# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: restores equal the cold run, and what other weights have computed is never found."""

from pathlib import Path
from typing import Any

import pytest

from tests.adapters import RANK, make_adapter
from tests.engine.client import Engine, Output, cpu_child, disk_child, multi, prompt
from tests.engine.control_file import switch
from tests.engine.restore import U, assert_restored
from tools.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

LENGTH = 300
MTP = {"method": "mtp", "num_speculative_tokens": 2}


def adapter(directory: Path, number: int) -> dict[str, Any]:
    return {"lora_name": directory.name, "lora_int_id": number, "lora_path": str(directory)}


@pytest.mark.parametrize(
    ("more", "num_dropped"),
    [
        ({}, 0),
        pytest.param({"async_scheduling": True}, 0, marks=pytest.mark.engines),
        pytest.param({"speculative_config": MTP}, U, marks=pytest.mark.engines),
    ],
    ids=["synchronous", "asynchronous", "mtp"],
)
def test_adapters_are_restored_by_both_tiers_and_never_mix(
    tmp_path: Path, more: dict[str, Any], num_dropped: int
) -> None:
    model = make_tiny_model(tmp_path / "model", has_draft_head=True)
    length, is_asynchronous = LENGTH - num_dropped, "async_scheduling" in more
    one = adapter(make_adapter(tmp_path / "one", seed=1), 1)
    two = adapter(make_adapter(tmp_path / "two", seed=2), 2)
    three = adapter(make_adapter(tmp_path / "three", seed=3), 3)
    tokens = prompt(LENGTH, seed=1)
    options = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": RANK, **more}
    disk = disk_child(tmp_path / "root")
    cold: dict[str, Output] = {}

    control = tmp_path / "control.json"
    tiers = multi(cpu_child(), disk, control_file=str(control))
    with Engine(model, kv_transfer_config=tiers, **options) as engine:

        def computed(name: str, of: dict[str, Any] | None) -> Output:
            """Nothing of it is found, and it differs from all that was computed before."""
            output = cold[name] = engine.generate(tokens, adapter=of)
            assert output.num_cached_tokens == 0
            assert not any(output.same_as(other) for key, other in cold.items() if key != name)
            return output

        def restored(expected: Output, of: dict[str, Any] | None) -> None:
            engine.reset_device_cache()
            assert_restored(expected, engine.generate(tokens, adapter=of), length)

        if is_asynchronous:  # or each one's first request is not stored (docs/models.md)
            for of in (one, two):
                engine.call("load_adapter", adapter=of)
        for name, of in {"base": None, "one": one, "two": two}.items():
            computed(name, of)
        for name, of in {"base": None, "one": one, "two": two}.items():
            restored(cold[name], of)

        # New weights under the same name and path: the device cache serves what the old ones have computed, we do not,
        # nor do we keep what was computed upon it.
        restored(cold["one"], one)
        make_adapter(tmp_path / "one", seed=4)
        engine.call("load_adapter", adapter=one, in_place=True)
        for _ in range(2):  # before and after the scheduler has heard of it
            stale = engine.generate(tokens, adapter=one)
            assert stale.num_cached_tokens > 0
        engine.reset_device_cache()
        assert not computed("four", one).same_as(stale)
        restored(cold["four"], {**one, "load_inplace": True})  # read anew in each step

        # They change again while a restore is under way.
        make_adapter(tmp_path / "one", seed=1)
        engine.reset_device_cache()
        engine.call("fault", name="reload_adapter_during_a_load", tier="cpu", adapter=one)
        assert engine.generate(tokens, adapter=one).same_as(cold["one"])
        assert engine.metric("vllm:hybrid_offload_failed_loads", connector="cpu", reason="adapter") == 1
        restored(cold["one"], one)

        # And while vLLM has evicted the adapter, so that its request brings them.
        for of in (two, three):
            engine.generate(tokens, adapter=of)
        make_adapter(tmp_path / "one", seed=5)
        engine.reset_device_cache()
        changed = engine.generate(tokens, adapter=one)
        assert engine.metric("vllm:hybrid_offload_failed_loads", connector="cpu", reason="adapter") == 2
        assert changed.same_as(engine.generate(tokens, adapter=one, salts=["nobody else's"]))

        # Also of a tier that may store nothing, and so sees no step of what it has loaded.
        switch(engine, control, {name: {"store": False} for name in ("cpu", "disk")})
        make_adapter(tmp_path / "two", seed=6)
        engine.reset_device_cache()
        changed = engine.generate(tokens, adapter=two)
        assert changed.same_as(engine.generate(tokens, adapter=two, salts=["nobody else's"]))
        assert engine.metric("vllm:hybrid_offload_failed_loads", connector="cpu", reason="adapter") == 3
        assert engine.metric("vllm:hybrid_offload_hook_errors") == 0
        engine.wait_for_stores()

    make_adapter(tmp_path / "one", seed=1)
    make_adapter(tmp_path / "two", seed=2, nudge=0.5)
    with Engine(model, kv_transfer_config=disk, **options) as engine:  # the disk tier alone
        for of in (one, two):
            engine.call("load_adapter", adapter=of)
        assert_restored(cold["one"], engine.generate(tokens, adapter=one), length)
        assert_restored(cold["base"], engine.generate(tokens), length)
        nudged = engine.generate(tokens, adapter=two)
        assert nudged.num_cached_tokens == 0
        assert not nudged.same_as(cold["two"])
        engine.wait_for_stores()  # the blocks are free before the files are written
        engine.reset_device_cache()
        assert_restored(nudged, engine.generate(tokens, adapter=two), length)

        make_adapter(tmp_path / "one", seed=6)
        engine.reset_device_cache()
        engine.call("fault", name="reload_adapter_during_a_load", tier="disk", adapter=one)
        changed = engine.generate(tokens, adapter=one)
        assert engine.metric("vllm:hybrid_offload_failed_loads", connector="disk", reason="adapter") == 1
        assert changed.same_as(engine.generate(tokens, adapter=one, salts=["nobody else's"]))
        assert engine.metric("vllm:hybrid_offload_hook_errors") == 0
