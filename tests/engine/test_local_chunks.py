# SPDX-License-Identifier: Apache-2.0
"""Llama 4: attention within chunks of the prompt, between full attention."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.models.families import ATTENTION_CHUNK, make_llama4

pytestmark = [pytest.mark.engine, pytest.mark.engines]

LENGTHS = (130, 257, 386, 770, 2050)
"""A few tokens after a restore point, inside a chunk of attention and at its beginning."""
BLOCK = 128
"""vLLM's device cache hits whole blocks alone in such a model."""
U = 64


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama4(tmp_path_factory.mktemp("models") / "llama4")


def test_local_chunks_are_restored_exactly_from_cpu_and_after_a_restart_from_disk(llama: Path, tmp_path: Path) -> None:
    config = multi(cpu_child(), disk_child(tmp_path / "root"))
    prompts = {length: prompt(length, seed=length) for length in LENGTHS}
    with Engine(llama, block_size=BLOCK, kv_transfer_config=config) as engine:
        cold = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        by_device = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        engine.wait_for_stores()
        engine.reset_device_cache()
        from_cpu = {length: engine.generate(tokens) for length, tokens in prompts.items()}
    with Engine(llama, block_size=BLOCK, kv_transfer_config=config) as engine:
        from_disk = {length: engine.generate(tokens) for length, tokens in prompts.items()}
    for length in LENGTHS:
        assert cold[length].num_cached_tokens == 0
        for restored in (by_device[length], from_cpu[length], from_disk[length]):
            assert restored.num_cached_tokens == (length - 1) // BLOCK * BLOCK
            assert restored.same_as(cold[length]), (length, cold[length], restored)


def test_only_the_chunk_of_the_boundary_is_loaded_and_its_bytes_matter(llama: Path) -> None:
    whole_chunks = 3 * ATTENTION_CHUNK
    tokens = prompt(whole_chunks + BLOCK + 2, seed=1)
    with Engine(llama, block_size=BLOCK, kv_transfer_config=multi(cpu_child())) as engine:
        engine.generate(tokens)
        by_device = engine.generate(tokens)

        def restore() -> tuple[bool, int]:
            engine.wait_for_stores()
            engine.reset_device_cache()
            before = engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu")
            answer = engine.generate(tokens)
            assert answer.num_cached_tokens == whole_chunks + BLOCK
            loaded = engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") - before
            return answer.same_as(by_device), int(loaded)

        same, num_bytes = restore()
        layer_bytes = 2 * 2 * 32 * 2
        assert same
        assert num_bytes == layer_bytes * (whole_chunks + BLOCK + 3 * BLOCK)

        first_needed = whole_chunks // U
        engine.call("fault", name="zero_chunk", kind="w0", position=first_needed - 1)
        assert restore()[0]
        engine.call("fault", name="zero_chunk", kind="w0", position=first_needed)
        assert not restore()[0]
