# SPDX-License-Identifier: Apache-2.0
"""Gemma 3: sliding windows between full attention, no recurrent state."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.models.families import SLIDING_WINDOW, make_gemma3

pytestmark = pytest.mark.engine

LENGTHS = (63, 65, 300, 640, 1153, 3900)
U = 64


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("models") / "gemma")


def test_windows_restore_what_the_device_cache_would_from_cpu_and_after_a_restart_from_disk(
    gemma: Path, tmp_path: Path
) -> None:
    config = multi(cpu_child(), disk_child(tmp_path / "root"))
    prompts = {length: prompt(length, seed=length) for length in LENGTHS}
    with Engine(gemma, kv_transfer_config=config) as engine:
        for tokens in prompts.values():
            engine.generate(tokens)
        by_device = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        engine.wait_for_stores()
        engine.reset_device_cache()
        from_cpu = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") > 0
    with Engine(gemma, kv_transfer_config=config) as engine:
        from_disk = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") > 0
    for length in LENGTHS:
        assert by_device[length].num_cached_tokens == (length - 1) // U * U
        for restored in (from_cpu[length], from_disk[length]):
            assert restored.num_cached_tokens == by_device[length].num_cached_tokens
            assert restored.same_as(by_device[length])


@pytest.mark.engines
def test_only_the_last_window_of_a_sliding_group_is_loaded_and_its_bytes_matter(gemma: Path) -> None:
    with Engine(gemma, kv_transfer_config=multi(cpu_child())) as engine:
        tokens = prompt(2010, seed=1)
        engine.generate(tokens)
        by_device = engine.generate(tokens)

        def restore() -> tuple[bool, int]:
            engine.wait_for_stores()
            engine.reset_device_cache()
            before = engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu")
            same = engine.generate(tokens).same_as(by_device)
            return same, int(engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") - before)

        same, num_bytes = restore()
        num_chunks = 1984 // U
        layer_bytes = U * 2 * 2 * 32 * 2
        assert same
        assert num_bytes == layer_bytes * (2 * num_chunks + 4 * (SLIDING_WINDOW // U))

        engine.call("fault", name="zero_chunk", kind="w0", position=num_chunks - 1 - SLIDING_WINDOW // U)
        assert restore()[0]
        engine.call("fault", name="zero_chunk", kind="w0", position=num_chunks - 2)
        assert not restore()[0]
