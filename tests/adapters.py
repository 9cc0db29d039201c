# SPDX-License-Identifier: Apache-2.0
"""Makes LoRA adapters for the tiny Qwen3.5 model, strong enough that no output is another's."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8

_MLP = {"mlp.gate_proj": (128, 256), "mlp.up_proj": (128, 256), "mlp.down_proj": (256, 128)}
_LINEAR = {
    "linear_attn.in_proj_qkv": (128, 1024),
    "linear_attn.in_proj_z": (128, 512),
    "linear_attn.in_proj_b": (128, 4),
    "linear_attn.in_proj_a": (128, 4),
    "linear_attn.out_proj": (512, 128),
}
_FULL = {
    "self_attn.q_proj": (128, 256),
    "self_attn.k_proj": (128, 64),
    "self_attn.v_proj": (128, 64),
    "self_attn.o_proj": (128, 128),
}
_LAYERS: tuple[Mapping[str, tuple[int, int]], ...] = (_LINEAR, _LINEAR, _LINEAR, _FULL)
"""Inputs and outputs of what each layer of ``tools/tiny_model.py``'s Qwen3.5 projects."""


def make_adapter(directory: Path, seed: int, *, nudge: float = 0.0) -> Path:
    """Writes a PEFT adapter over all projections to ``directory``, in place of what is there. Returns ``directory``.

    ``nudge`` is added to one single weight.
    """
    source = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, projections in enumerate(_LAYERS):
        for name, (num_inputs, num_outputs) in {**projections, **_MLP}.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, num_inputs, generator=source) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(num_outputs, RANK, generator=source) * 0.1
    tensors["base_model.model.model.layers.3.mlp.down_proj.lora_B.weight"][0, 0] += nudge
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({**config, "target_modules": modules}))
    return directory
