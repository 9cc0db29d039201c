# SPDX-License-Identifier: Apache-2.0
"""What vLLM answers for published models on CUDA, with bfloat16 weights and float32 states: one rank's groups.

In the Qwen models one layer in four has full attention, of 2 KV heads of size 256, and the others GDN. Block sizes are
those that vLLM is known to log.
"""

from dataclasses import replace

from vllm_overlay.planner.geometry import Group, GroupKind
from vllm_overlay.planning.question import EngineLayout


def layout(block_size: int, token_bytes: int, state_bytes: int = 0, **changes: object) -> EngineLayout:
    """``token_bytes`` of all layers of full attention; ``state_bytes`` of all other layers, if there are any."""
    states = [Group(0, GroupKind.RECURRENT, block_size, 0, state_bytes, sliceable=False)] * bool(state_bytes)
    full = Group(len(states), GroupKind.FULL, block_size, token_bytes, block_size * token_bytes, sliceable=True)
    found = EngineLayout(
        vllm="0.32.0",
        platform="cpu",
        groups=(*states, full),
        block_size=block_size,
        dtype="bfloat16",
        state_dtype="float32" if states else "",
        max_model_len=262144,
        max_num_batched_tokens=8192,
    )
    return replace(found, **changes)


QWEN_0_8B = layout(544, 6 * 2048, 18 * 1_085_440)
"""24 layers, 16 value heads."""
QWEN_27B = layout(784, 16 * 4096, 48 * 3_207_168)
"""64 layers, 48 value heads, 4 KV heads."""
QWEN_27B_EXACT = layout(832, 16 * 4096, 48 * 3_207_168)
QWEN_35B = layout(1056, 10 * 2048, 30 * 2_146_304)
"""40 layers, 32 value heads."""
QWEN_35B_EXACT = layout(1088, 10 * 2048, 30 * 2_146_304)
"""With ``--block-size 64`` or 1088, as that of the 27B with 64 or 832."""
LLAMA = layout(16, 32 * 4096)
"""32 layers of full attention, 8 KV heads of size 128."""


def halved(whole: EngineLayout) -> EngineLayout:
    """One of two ranks."""
    groups = [
        replace(group, token_bytes=group.token_bytes // 2, page_bytes=group.page_bytes // 2) for group in whole.groups
    ]
    return replace(whole, groups=tuple(groups))
