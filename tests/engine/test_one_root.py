# SPDX-License-Identifier: Apache-2.0
"""Two engines share a disk root: neither restores the other's where they compute other numbers, and each where not."""

import shutil
from pathlib import Path

import pytest

from tests.engine.client import Engine, Output, disk_child, multi, prompt
from tests.engine.restore import assert_restored
from tests.engine.states import BFLOAT16, FLOAT32
from tests.models.families import LONG_ROPE_FROM_TOKENS, make_phi3

pytestmark = [pytest.mark.engine, pytest.mark.engines]

PROMPTS = {length: prompt(length, seed=length) for length in (150, 300, 700, 900)}


def outputs(engine: Engine) -> dict[int, Output]:
    """Of every prompt, with what the engine finds."""
    return {length: engine.generate(tokens) for length, tokens in PROMPTS.items()}


def recomputed(engine: Engine) -> dict[int, Output]:
    """Of every prompt, under a salt with which nothing was stored."""
    found = {length: engine.generate_many([tokens], salts=["new"])[0] for length, tokens in PROMPTS.items()}
    assert not any(output.num_cached_tokens for output in found.values())
    return found


def assert_same(found: dict[int, Output], right: dict[int, Output]) -> None:
    wrong = {length: (found[length], right[length]) for length in PROMPTS if not found[length].same_as(right[length])}
    assert not wrong, f"{len(wrong)} of {len(PROMPTS)} are wrong: {wrong}"


def test_other_long_rope_factors_have_other_objects(tmp_path: Path) -> None:
    """vLLM chooses the factors by ``--max-model-len``. Two limits on one side of the threshold share all objects."""
    model = make_phi3(tmp_path / "phi")
    options = {"block_size": 64, "kv_transfer_config": multi(disk_child(tmp_path / "root"))}
    with Engine(model, max_model_len=LONG_ROPE_FROM_TOKENS, **options) as engine:
        short = outputs(engine)
        engine.wait_for_stores()
    with Engine(model, max_model_len=2 * LONG_ROPE_FROM_TOKENS, **options) as engine:
        found, right = outputs(engine), recomputed(engine)
        assert not any(right[length].same_as(short[length]) for length in PROMPTS)
        assert_same(found, right)
    with Engine(model, max_model_len=LONG_ROPE_FROM_TOKENS // 2, **options) as engine:
        for length, output in outputs(engine).items():
            assert_restored(short[length], output, length)


def test_states_of_another_precision_have_other_attention_chunks(tiny_model: Path, tmp_path: Path) -> None:
    """Attention above recurrent layers depends on how exactly their states are kept."""
    config = multi(disk_child(tmp_path / "root"))
    with Engine(tiny_model, **BFLOAT16.arguments, kv_transfer_config=config) as engine:
        outputs(engine)
        engine.wait_for_stores()
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=config) as engine:
        cold = outputs(engine)
        engine.evict()
        restored = outputs(engine)
        assert_same(restored, cold)
        for length, output in restored.items():
            assert_restored(cold[length], output, length)


def test_a_model_that_moved_into_the_hubs_cache_restores_what_it_stored(tiny_model: Path, tmp_path: Path) -> None:
    """There each file is a link to a blob, whose name says nothing."""
    config = multi(disk_child(tmp_path / "root"))
    with Engine(tiny_model, **FLOAT32.arguments, kv_transfer_config=config) as engine:
        cold = outputs(engine)
        engine.wait_for_stores()
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "0a1b", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(tiny_model.iterdir(), reverse=True)):
        shutil.copy(file, blobs / f"{number}f3c")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}f3c")
    with Engine(snapshot, **FLOAT32.arguments, kv_transfer_config=config) as engine:
        for length, output in outputs(engine).items():
            assert_restored(cold[length], output, length)
