# SPDX-License-Identifier: Apache-2.0
"""Bytes of published models for replays, cut at the blocks of a trace.

Each number follows from the model's published ``config.json``. A token's attention is the keys and values of all layers
of a kind in bfloat16. A state is the recurrent state in float32, and the last tokens of the convolution in bfloat16.
"""

from dataclasses import dataclass

from vllm_overlay.planner.geometry import Geometry, Group, GroupKind


@dataclass(frozen=True, slots=True)
class Model:
    """What a replay must know of a model. ``block_tokens`` is vLLM's N, which a device cache hits at multiples of."""

    source: str
    token_bytes: int
    state_bytes: int = 0
    window_token_bytes: int = 0
    window: int = 0
    block_tokens: int = 0

    def geometry(self, trace_block: int) -> Geometry:
        """Chunks and match unit are a trace's block; N is rounded to the next multiple of it."""
        size = max(1, round(self.block_tokens / trace_block)) * trace_block
        groups = [_attention(0, GroupKind.FULL, size, self.token_bytes, 0)]
        if self.window:
            groups.append(_attention(1, GroupKind.WINDOW, size, self.window_token_bytes, self.window))
        if self.state_bytes:
            groups.append(Group(len(groups), GroupKind.RECURRENT, size, 0, self.state_bytes, sliceable=False))
        return Geometry.build(groups, trace_block, trace_block)


def _attention(group_id: int, kind: GroupKind, size: int, token_bytes: int, window: int) -> Group:
    return Group(group_id, kind, size, token_bytes, size * token_bytes, sliceable=True, window=window)


MODELS = {
    "qwen3.5-35b-a3b": Model(
        "40 layers, 10 of full attention, 2 KV heads of 256; 30 GDN layers of 32 heads of 128 x 128",
        token_bytes=10 * 2 * 2 * 256 * 2,
        state_bytes=63_000_000,
        block_tokens=1056,
    ),
    "qwen3.6-27b": Model(
        "64 layers, 16 of full attention, 4 KV heads of 256; 48 GDN layers of 48 heads of 128 x 128",
        token_bytes=16 * 2 * 4 * 256 * 2,
        state_bytes=48 * (48 * 128 * 128 * 4 + 10_240 * 3 * 2),
        block_tokens=784,
    ),
    "nemotron-h-8b": Model(
        "52 layers, 4 of full attention, 8 KV heads of 128; 24 Mamba2 layers of 128 heads of 64 x 128",
        token_bytes=4 * 2 * 8 * 128 * 2,
        state_bytes=24 * (128 * 64 * 128 * 4 + 10_240 * 3 * 2),
        block_tokens=2096,
    ),
    "gpt-oss-20b": Model(
        "24 layers, 12 of full attention and 12 with a window of 128, 8 KV heads of 64",
        token_bytes=12 * 2 * 8 * 64 * 2,
        window_token_bytes=12 * 2 * 8 * 64 * 2,
        window=128,
    ),
    "llama-3.1-8b": Model("32 layers of full attention, 8 KV heads of 128", token_bytes=32 * 2 * 8 * 128 * 2),
}
DEFAULT_MODEL = "qwen3.5-35b-a3b"
