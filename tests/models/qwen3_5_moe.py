# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 with experts: three GDN layers before each of full attention."""

from pathlib import Path

from tests.models.configuration import gdn
from tools.tiny_model import DEFAULT_CONTEXT_TOKENS, remember_and_look, write_model


def make_qwen3_5_moe(directory: Path, *, context_tokens: int = DEFAULT_CONTEXT_TOKENS) -> Path:
    """Writes a model of eight layers, as ``make_tiny_model`` does."""

    def make():
        import torch
        from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

        config = Qwen3_5MoeTextConfig(
            **gdn(context_tokens),
        )
        torch.manual_seed(0)
        model = Qwen3_5MoeForCausalLM(config).to(torch.bfloat16)
        remember_and_look(model)
        return model

    return write_model(directory, make)
