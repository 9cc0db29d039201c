# SPDX-License-Identifier: Apache-2.0
"""A rotary embedding on a CPU: queries and keys with heads in a dimension of their own, or parts of such, and one row a
token."""

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from tests.patches.lab import conclude

SYMPTOM = "with heads in a dimension of their own most tokens are not rotated, the others by wrong positions"
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 64, 4, 2, 32


def main() -> None:
    torch.manual_seed(0)
    query = torch.randn(NUM_TOKENS, NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    key = torch.randn(NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    positions = torch.arange(NUM_TOKENS)
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(HEAD_SIZE, max_position=NUM_TOKENS, rope_parameters={"rope_theta": 10000.0}, dtype=query.dtype)
    rows = rope.forward_cpu(positions, query.flatten(1).clone(), key.flatten(1).clone())
    heads = rope.forward_cpu(positions, query.clone(), key.clone())
    part = torch.cat((query, query), dim=-1)[..., HEAD_SIZE:]
    parts = rope.forward_cpu(positions, part, key.clone())
    found = zip(heads + parts, rows * 2, strict=True)
    differing = [int((apart.flatten(1) != row).any(dim=1).sum()) for apart, row in found]
    unchanged = int((heads[0] == query).flatten(1).all(dim=1).sum())
    conclude(unchanged > NUM_TOKENS // 2, not any(differing), unchanged=unchanged, differing=differing)


if __name__ == "__main__":
    main()
