# SPDX-License-Identifier: Apache-2.0
"""The KV cache of Qwen3.5-35B-A3B on the CPU backend, without the model, and prompts for it."""

import hashlib
from collections.abc import Sequence

import torch

from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.transfer.base import Placement, Span
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.page_map import known_page_maps

BLOCK_TOKENS = 1056
"""N as vLLM finds it with float32 states. So the figures do not depend on the machine's own choice."""
MATCH_UNIT = 48
NUM_HEADS, HEAD_SIZE = 2, 256
LAYERS_A_GROUP, STATE_GROUPS = 10, 3
STATE_BYTES = 32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2
"""One layer's state: 32 heads of 128 x 128 floats, and 3 columns of the convolution's input in bf16."""
TOKEN_BYTES = LAYERS_A_GROUP * NUM_HEADS * 2 * HEAD_SIZE * 2


def geometry(target_bytes: int | None = None) -> Geometry:
    """How a tier cuts the model's prompts. ``target_bytes`` is what the disk tier's ``auto`` gives."""
    attention = Group(0, GroupKind.FULL, BLOCK_TOKENS, TOKEN_BYTES, BLOCK_TOKENS * TOKEN_BYTES, sliceable=True)
    state_bytes = LAYERS_A_GROUP * STATE_BYTES
    states = [
        Group(1 + place, GroupKind.RECURRENT, BLOCK_TOKENS, 0, state_bytes, sliceable=False)
        for place in range(STATE_GROUPS)
    ]
    return Geometry.build([attention, *states], MATCH_UNIT, "auto", target_bytes)


def kv_cache(num_blocks: int, layout: str = "column_keys") -> dict[int, GroupTensors]:
    """Warm tensors: as in vLLM, the groups' i-th layers share one buffer of pages. ``layout`` names a page map."""
    page_bytes = BLOCK_TOKENS * TOKEN_BYTES // LAYERS_A_GROUP
    buffers = [torch.randint(0, 256, (num_blocks, page_bytes), dtype=torch.uint8) for _ in range(LAYERS_A_GROUP)]
    shape = (num_blocks, NUM_HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE)
    page_map = next(page_map for page_map in known_page_maps(BLOCK_TOKENS, HEAD_SIZE) if page_map.name == layout)
    attention = GroupTensors(tuple(buffer.view(torch.bfloat16).view(shape) for buffer in buffers), page_map)
    states = GroupTensors(tuple(buffer[:, :STATE_BYTES] for buffer in buffers))
    return {0: attention} | {1 + place: states for place in range(STATE_GROUPS)}


def keys(num_tokens: int, name: str) -> list[bytes]:
    """What vLLM's block hashes of a prompt would be: 32 bytes for each match unit."""
    return [hashlib.sha256(f"{name} {place}".encode()).digest() for place in range(num_tokens // MATCH_UNIT)]


def placements(objects: Sequence[PlannedObject], num_blocks: int) -> list[Placement]:
    """Chunks in the blocks of their tokens, snapshots in the blocks of their turn."""
    chunks = [_chunk_placement(planned, num_blocks) for planned in objects if planned.group_id is not None]
    snapshots = [
        Placement(pages=tuple((1 + group, (STATE_GROUPS * turn + group) % num_blocks) for group in range(STATE_GROUPS)))
        for turn in range(len(objects) - len(chunks))
    ]
    return chunks + snapshots


def _chunk_placement(planned: PlannedObject, num_blocks: int) -> Placement:
    block, offset = divmod(planned.start_tokens, BLOCK_TOKENS)
    return Placement(spans=(Span(0, block % num_blocks, offset, planned.end_tokens - planned.start_tokens),))
