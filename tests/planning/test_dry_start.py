# SPDX-License-Identifier: Apache-2.0
"""What a dry start answers is what a real engine has: blocks, bytes, chunks. It needs no weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import Engine, cpu_child, multi, prompt
from vllm_overlay.config import ConfigError
from vllm_overlay.planning.ask_vllm import ask_vllm
from vllm_overlay.planning.capacity import geometry_of
from vllm_overlay.planning.question import Question
from vllm_overlay.tiers.factory import tier_spec

pytestmark = pytest.mark.engine


@pytest.fixture
def without_weights(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model's configuration alone."""
    directory = tmp_path / "configuration"
    directory.mkdir()
    shutil.copy(tiny_model / "config.json", directory)
    return directory


@pytest.mark.processor
def test_vllm_answers_without_weights_what_its_engine_has(tiny_model: Path, without_weights: Path) -> None:
    """With the dtype of states that vLLM chooses on this processor."""
    layout = ask_vllm(Question(model=str(without_weights)))
    with Engine(tiny_model, kv_transfer_config=multi(cpu_child(hybrid_chunk_size="auto"))) as engine:
        assert f"Setting attention block size to {layout.block_size} tokens" in engine.log
        engine.generate(prompt(100, seed=1))
        engine.wait_for_stores()
        measured = {
            name: engine.metric(f"vllm:hybrid_offload_{name}", connector="cpu")
            for name in ("block_tokens", "chunk_tokens", "restore_unit_tokens", "token_bytes", "state_bytes")
        }
    geometry = geometry_of(layout, 64, tier_spec({"tier": "cpu"}))
    assert measured == {
        "block_tokens": layout.block_size,
        "chunk_tokens": geometry.chunk_size,
        "restore_unit_tokens": geometry.restore_unit,
        "token_bytes": geometry.token_bytes,
        "state_bytes": geometry.state_bytes,
    }
    assert layout.max_model_len == 8192
    assert (layout.vllm, layout.platform) == ("0.32.0", "cpu")


@pytest.mark.engines
def test_one_process_answers_for_two_ranks(without_weights: Path) -> None:
    """Each has one of the two KV heads, and half of the states."""
    one, two = (
        ask_vllm(Question(model=str(without_weights), tensor_parallel_size=ranks, mamba_ssm_cache_dtype="float32"))
        for ranks in (1, 2)
    )
    assert one.block_size == two.block_size
    assert [2 * group.page_bytes for group in two.groups] == [group.page_bytes for group in one.groups]
    assert [2 * group.token_bytes for group in two.groups] == [group.token_bytes for group in one.groups]


def test_what_the_connector_refuses_is_refused_in_its_words(without_weights: Path) -> None:
    question = Question(model=str(without_weights), mamba_ssm_cache_dtype="float32", prefix_match_unit=100)
    with pytest.raises(ConfigError, match="--prefix-match-unit 100 must divide every attention block size, here 1152"):
        ask_vllm(question)


@pytest.mark.engines
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_model_len": 1 << 20}, "max_model_len"),
        ({"block_size": 0}, "block_size: Input should be greater than 0"),
        ({"kv_cache_dtype": "float7"}, "cache_dtype: Input should be 'auto', "),
    ],
)
def test_what_vllm_refuses_is_refused_in_its_words(without_weights: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM cannot start .*{words}"):
        ask_vllm(Question(model=str(without_weights), **given))
