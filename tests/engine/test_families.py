# SPDX-License-Identifier: Apache-2.0
"""Models of other families: both tiers restore what the device cache would, and of that every byte matters."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import Engine, cpu_child, disk_child, multi, prompt
from tests.models.families import ATTENTION_CHUNK, SLIDING_WINDOW, make_gemma3, make_llama4, make_nemotron_h

pytestmark = pytest.mark.engine

U = 64
LLAMAS_BLOCK = 128
"""vLLM's device cache hits whole blocks alone in such a model."""


@dataclass(frozen=True)
class Family:
    """``lengths`` end around restore points, which are ``unit`` tokens apart. Where a cold run's steps round otherwise
    than those after a hit, ``is_exact`` is false."""

    make: Callable[[Path], Path]
    lengths: tuple[int, ...]
    unit: int = U
    is_exact: bool = True

    def engine(self, model: Path, *children: dict[str, Any]) -> Engine:
        return Engine(
            model, **({} if self.unit == U else {"block_size": self.unit}), kv_transfer_config=multi(*children)
        )


GEMMA3 = Family(make_gemma3, (63, 65, 300, 640, 1153, 3900), is_exact=False)
"""Sliding windows between full attention, no recurrent state."""
NEMOTRON_H = Family(make_nemotron_h, (65, 130, 642, 1153, 2945))
"""Mamba2, attention and MLP in layers of their own, blocks of 640 tokens. States are float32 on every processor."""
LLAMA4 = Family(make_llama4, (130, 257, 386, 770, 2050), LLAMAS_BLOCK)
"""Attention within chunks of the prompt, between full attention. Lengths end inside a chunk and at its beginning."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(GEMMA3, id="gemma3"),
        pytest.param(NEMOTRON_H, id="nemotron-h"),
        pytest.param(LLAMA4, id="llama4", marks=pytest.mark.engines),
    ],
)
def test_a_family_is_restored_exactly_from_cpu_and_after_a_restart_from_disk(tmp_path: Path, family: Family) -> None:
    model = family.make(tmp_path / "model")
    children = cpu_child(), disk_child(tmp_path / "root")
    prompts = {length: prompt(length, seed=length) for length in family.lengths}
    with family.engine(model, *children) as engine:
        cold = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        by_device = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        engine.evict()
        from_cpu = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") > 0
    with family.engine(model, *children) as engine:
        from_disk = {length: engine.generate(tokens) for length, tokens in prompts.items()}
        assert engine.metric("vllm:hybrid_offload_loaded_bytes", connector="disk") > 0
    for length in family.lengths:
        assert cold[length].num_cached_tokens == 0
        right = (cold if family.is_exact else by_device)[length]
        for restored in (by_device[length], from_cpu[length], from_disk[length]):
            assert restored.num_cached_tokens == (length - 1) // family.unit * family.unit
            assert restored.same_as(right), (length, right, restored)


LAYER_TOKEN_BYTES = 2 * 2 * 32 * 2
GEMMAS_CHUNKS, LLAMAS_WHOLE = 1984 // U, 3 * ATTENTION_CHUNK
GEMMAS_FIRST = (1984 - SLIDING_WINDOW) // LLAMAS_BLOCK * LLAMAS_BLOCK // U
"""Gemma's blocks are as large. Its window begins in the middle of one, which is needed whole."""


@pytest.mark.engines
@pytest.mark.parametrize(
    ("family", "restored", "num_bytes", "needless", "needed"),
    [
        pytest.param(
            GEMMA3,
            GEMMAS_CHUNKS * U,
            LAYER_TOKEN_BYTES * (2 * GEMMAS_CHUNKS + 4 * (GEMMAS_CHUNKS - GEMMAS_FIRST)) * U,
            GEMMAS_FIRST - 1,
            GEMMAS_CHUNKS - 2,
            id="the last window of gemma3",
        ),
        pytest.param(
            LLAMA4,
            LLAMAS_WHOLE + LLAMAS_BLOCK,
            LAYER_TOKEN_BYTES * (LLAMAS_WHOLE + LLAMAS_BLOCK + 3 * LLAMAS_BLOCK),
            LLAMAS_WHOLE // U - 1,
            LLAMAS_WHOLE // U,
            id="the boundary's chunk of llama4",
        ),
    ],
)
def test_of_local_attention_only_what_is_needed_is_loaded_and_its_bytes_matter(
    tmp_path: Path, family: Family, restored: int, num_bytes: int, needless: int, needed: int
) -> None:
    tokens = prompt(restored + 2, seed=1)
    with family.engine(family.make(tmp_path / "model"), cpu_child()) as engine:
        engine.generate(tokens)
        by_device = engine.generate(tokens)

        def restore() -> tuple[bool, int]:
            engine.evict()
            before = engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu")
            answer = engine.generate(tokens)
            assert answer.num_cached_tokens == restored
            loaded = engine.metric("vllm:hybrid_offload_loaded_bytes", connector="cpu") - before
            return answer.same_as(by_device), int(loaded)

        assert restore() == (True, num_bytes)
        engine.call("fault", name="zero", kind="w0", position=needless)
        assert restore()[0]
        engine.call("fault", name="zero", kind="w0", position=needed)
        assert not restore()[0]


@pytest.mark.engines
def test_a_zeroed_state_and_a_zeroed_chunk_of_attention_change_the_answer(tmp_path: Path) -> None:
    with NEMOTRON_H.engine(make_nemotron_h(tmp_path / "model"), cpu_child()) as engine:
        tokens = prompt(130, seed=1)
        for zeroed in ({"kind": "s"}, {"kind": "f0", "position": 0}):
            engine.call("reset_everything")
            cold = engine.generate(tokens)
            engine.evict()
            engine.call("fault", name="zero", **zeroed)
            restored = engine.generate(tokens)
            assert restored.num_cached_tokens == 128
            assert not restored.same_as(cold, tolerance=0.1), zeroed
