# SPDX-License-Identifier: Apache-2.0
"""What vLLM tells listeners of a LoRA adapter that it has loaded."""

from types import SimpleNamespace
from typing import Any

import torch


def adapter_model(nudge: float = 0.0, scaling: float = 2.0, part: str = "q_proj", **changes: Any) -> Any:
    """Looks like vLLM's LoRAModel as it is read from its files."""
    a, b = torch.ones(8, 16, dtype=torch.bfloat16), torch.zeros(32, 8, dtype=torch.bfloat16)
    b[31, 7] += nudge
    layer = SimpleNamespace(rank=8, scaling=scaling, lora_a=a, lora_b=b)
    return SimpleNamespace(
        **{"loras": {f"layers.0.{part}": layer}, "modules_to_save": {}, "is_3d_lora_weight": False, **changes}
    )


def named(name: str = "a", path: str = "/a", adapter_id: int = 1) -> Any:
    return SimpleNamespace(lora_int_id=adapter_id, lora_name=name, lora_path=path)
