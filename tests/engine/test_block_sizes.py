# SPDX-License-Identifier: Apache-2.0
"""Attention chunks on disk outlive the block size they were computed with."""

from pathlib import Path

import pytest

from tests.engine.client import Engine, Output, disk_child, multi, prompt

pytestmark = pytest.mark.engine


def make_attention_model(directory: Path) -> Path:
    """A tiny Llama whose output depends on what it attends to."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    factors = {"q_proj": 16.0, "k_proj": 16.0, "v_proj": 8.0, "o_proj": 16.0, "lm_head": 8.0}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for part, factor in factors.items():
                if part in name:
                    parameter.mul_(factor)
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(directory)
    return directory


def run(model: Path, root: Path, block_size: int, tokens: list[int]) -> tuple[Output, str]:
    """The output of a fresh engine, and its log."""
    arguments = {"block_size": block_size, "skip_tokenizer_init": True}
    with Engine(model, max_model_len=2048, kv_transfer_config=multi(disk_child(root)), **arguments) as engine:
        output = engine.generate(tokens, detokenize=False)
        engine.wait_for_stores()
        return output, engine.log


def test_chunks_written_under_one_block_size_are_found_under_another(tmp_path: Path) -> None:
    model = make_attention_model(tmp_path / "model")
    tokens = prompt(700, seed=1)
    cold, _ = run(model, tmp_path / "root", 64, tokens)
    other_cold, _ = run(model, tmp_path / "another root", 128, tokens)
    restored, _ = run(model, tmp_path / "root", 128, tokens)
    assert cold.num_cached_tokens == other_cold.num_cached_tokens == 0
    assert restored.num_cached_tokens == 640
    assert restored.same_as(other_cold, tolerance=0.05)
