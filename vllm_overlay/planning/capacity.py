# SPDX-License-Identifier: Apache-2.0
"""What one tier holds of a model: tokens, snapshots, whole conversations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planning.question import EngineLayout
from vllm_overlay.tiers.base import TierRoom, TierSpec


@dataclass(frozen=True, slots=True)
class Conversation:
    """``num_tokens`` in all when it is over. Each of ``num_turns`` prompts leaves a snapshot.

    ``retention_interval``: vLLM keeps one more state every so many tokens; 0: none.
    """

    num_tokens: int
    num_turns: int = 1
    retention_interval: int = 0

    @property
    def num_snapshots(self) -> int:
        periodic = self.num_tokens // self.retention_interval if self.retention_interval else 0
        return self.num_turns + periodic


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """Bytes are of all ranks together, as the tier keeps them; counts are of what fits alone, not beside the others."""

    name: str
    capacity_bytes: int
    chunk_tokens: int
    restore_unit_tokens: int
    token_bytes: float
    snapshot_bytes: int
    """The largest snapshot: all states, and the attention of a tail. 0 for a model without recurrent states."""
    num_tokens: int
    num_snapshots: int
    conversation_bytes: int
    num_conversations: int
    size_of_one: int
    """The size to give the tier so that it holds one conversation."""
    geometry: str
    """The line that the server will log."""

    @classmethod
    def of(
        cls,
        name: str,
        room: TierRoom,
        chunks: Sequence[tuple[int, int]],
        snapshot_bytes: int,
        conversation: Conversation,
        units: tuple[int, int],
        geometry: str,
    ) -> "TierCapacity":
        """``chunks``: bytes in the tier and tokens, of each group with attention. ``units``: of chunk and restore."""
        token_bytes = sum(num_bytes / tokens for num_bytes, tokens in chunks)
        conversation_bytes = conversation.num_snapshots * snapshot_bytes
        conversation_bytes += sum(conversation.num_tokens // tokens * num_bytes for num_bytes, tokens in chunks)
        return cls(
            name=name,
            capacity_bytes=room.capacity_bytes,
            chunk_tokens=units[0],
            restore_unit_tokens=units[1],
            token_bytes=token_bytes,
            snapshot_bytes=snapshot_bytes,
            num_tokens=int(room.capacity_bytes / token_bytes) if token_bytes else 0,
            num_snapshots=room.capacity_bytes // snapshot_bytes if snapshot_bytes else 0,
            conversation_bytes=conversation_bytes,
            num_conversations=room.capacity_bytes // conversation_bytes if conversation_bytes else 0,
            size_of_one=conversation_bytes + (room.held_bytes and max(room.held_bytes, -(-conversation_bytes // 7))),
            geometry=geometry,
        )


def geometry_of(layout: EngineLayout, match_unit: int, spec: TierSpec[Any]) -> Geometry:
    """How a tier cuts prompts. Raises the GeometryError that a start would."""
    return Geometry.build(layout.groups, match_unit, spec.settings.hybrid_chunk_size, spec.auto_object_bytes)


def tier_capacity(
    spec: TierSpec[Any], geometry: Geometry, world_size: int, step_tokens: int, conversation: Conversation
) -> TierCapacity | None:
    """What the tier holds, or None if it cannot tell. Raises ConfigError for a capacity that cannot work."""
    room = spec.room(geometry, world_size, step_tokens)
    if room is None:
        return None
    return TierCapacity.of(
        spec.settings.name,
        room,
        [
            (room.object_bytes(geometry.chunk_bytes(group)), geometry.chunk_size_of(group))
            for group in geometry.attention
        ],
        room.object_bytes(geometry.max_snapshot_bytes) if geometry.recurrent else 0,
        conversation,
        (geometry.chunk_size, geometry.restore_unit),
        geometry.describe(),
    )
