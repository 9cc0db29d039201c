# SPDX-License-Identifier: Apache-2.0
"""Which rotary embeddings are facts: those that the model's configuration alone does not decide."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.llama4 import Llama4ForCausalLM

from tests.connector.engine_facts import Settings, fingerprints, vllm_config
from vllm_overlay.connector import numerics
from vllm_overlay.connector.numerics import rotary_facts

LENGTHS = (256, 512)
SCALED = {"factor": 2.0, "original_max_position_embeddings": 128}
LLAMA3 = {**SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MROPE = {"mrope_section": [4, 6, 6]}
LONG = {**SCALED, "short_factor": (1.0,) * 16, "long_factor": (4.0,) * 16}

OF_THE_CONFIGURATION: dict[str, dict[str, Any]] = {
    "BailingMRotaryEmbedding": {"rope_type": "bailing_mrope", **MROPE},
    "DeepseekScalingRotaryEmbedding": {"rope_type": "deepseek_yarn", **SCALED},
    "DeepseekV4ScalingRotaryEmbedding": {"rope_type": "deepseek_yarn", "is_deepseek_v4": True, **SCALED},
    "DynamicNTKAlphaRotaryEmbedding": {"rope_type": "dynamic", "alpha": 2.0},
    "Gemma4RotaryEmbedding": {"rope_type": "proportional"},
    "LinearScalingRotaryEmbedding": {"rope_type": "linear", "factor": 2.0},
    "Llama3RotaryEmbedding": {"rope_type": "llama3", **LLAMA3},
    "MRotaryEmbedding": {"rope_type": "default", **MROPE},
    "MRotaryEmbeddingInterleaved": {"rope_type": "openpangu", "mrope_interleaved": True, **MROPE},
    "NTKScalingRotaryEmbedding": {"rope_type": "ntk", "factor": 2.0},
    "RotaryEmbedding": {"rope_type": "default"},
    "YaRNScalingRotaryEmbedding": {"rope_type": "yarn", **SCALED},
}
"""Parameters that make one of each class, but DualChunk (no cache of that name) and Llama 4's images (no ``get_rope``
for text)."""


@pytest.fixture(autouse=True)
def no_embeddings_of_other_tests() -> Iterator[None]:
    with patch.object(rotary_embedding, "_ROPE_DICT", {}):
        yield


@pytest.fixture
def config(tiny_model: Path) -> VllmConfig:
    return vllm_config(tiny_model, Settings())


def embedding(config: VllmConfig, length: int, parameters: dict[str, Any]) -> Any:
    with set_current_vllm_config(config):
        return rotary_embedding.get_rope(32, length, rope_parameters=parameters, dtype=torch.float32)


@pytest.mark.parametrize("name", OF_THE_CONFIGURATION)
def test_a_longer_table_rotates_each_position_alike_and_is_no_fact(config: VllmConfig, name: str) -> None:
    parameters = OF_THE_CONFIGURATION[name]
    shorter, longer = (embedding(config, length, parameters) for length in LENGTHS)
    assert type(longer).__name__ == name
    assert shorter is not longer
    assert torch.equal(shorter.cos_sin_cache[:128], longer.cos_sin_cache[:128])
    assert rotary_facts() == []


def test_every_class_that_is_no_fact_was_looked_at() -> None:
    seen = OF_THE_CONFIGURATION.keys() | {"DualChunkRotaryEmbedding", "Llama4VisionRotaryEmbedding"}
    assert seen == numerics._ROTATIONS_OF_THE_CONFIGURATION


@pytest.mark.parametrize(
    "parameters",
    [{"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 128}, {"rope_type": "longrope", **LONG}],
    ids=lambda parameters: str(parameters["rope_type"]),
)
def test_a_longer_table_that_rotates_otherwise_is_another_fact(config: VllmConfig, parameters: dict[str, Any]) -> None:
    facts = []
    for length in LENGTHS:
        with patch.object(rotary_embedding, "_ROPE_DICT", {}):
            embedding(config, length, parameters)
            facts.append(rotary_facts())
    assert len(facts[0]) == len(facts[1]) == 1
    assert facts[0] != facts[1]


def test_a_class_that_nobody_has_looked_at_is_a_fact_with_all_its_values() -> None:
    module = type("NewRotaryEmbedding", (), {})()
    vars(module).update(scale=2.0, is_long=True, table=torch.zeros(1), _hidden=1, training=True)
    with patch.object(rotary_embedding, "_ROPE_DICT", {(): module}):
        assert rotary_facts() == [{"class": "NewRotaryEmbedding", "is_long": True, "scale": 2.0}]


def test_the_temperature_that_llama_4_takes_from_the_limit_is_a_fact(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's model writes it to the configuration while it is made, where the fingerprint finds it."""
    monkeypatch.setattr(LlamaForCausalLM, "__init__", lambda self, **_: None)
    monkeypatch.setattr(Llama4ForCausalLM, "set_moe_parameters", lambda self: None)

    def make(config: VllmConfig) -> None:
        model_config = SimpleNamespace(
            hf_config=config.model_config.hf_config,
            max_model_len=config.model_config.max_model_len,
            try_get_generation_config=dict,
            override_generation_config={},
        )
        Llama4ForCausalLM(vllm_config=SimpleNamespace(model_config=model_config))  # type: ignore[arg-type]

    made = [
        fingerprints(
            tiny_model,
            Settings({"max_model_len": length, "hf_overrides": {"max_position_embeddings": 65_536}}, edit=make),
        ).attention
        for length in (32_768, 16_384, 32_769)
    ]
    assert made[0] == made[1] != made[2]
