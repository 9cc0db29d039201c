# SPDX-License-Identifier: Apache-2.0
"""What one tier holds of a model: tokens, snapshots, whole conversations."""

from dataclasses import dataclass
from typing import Any

from vllm_overlay.planner.geometry import Geometry, Group
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
    geometry: str
    """The line that the server will log."""


def geometry_of(layout: EngineLayout, match_unit: int, spec: TierSpec[Any]) -> Geometry:
    """How a tier cuts prompts. Raises the GeometryError that a start would."""
    return Geometry.build(layout.groups, match_unit, spec.settings.hybrid_chunk_size, spec.auto_object_bytes)


def tier_capacity(
    spec: TierSpec[Any], geometry: Geometry, world_size: int, conversation: Conversation
) -> TierCapacity | None:
    """What the tier holds, or None if it cannot tell. Raises ConfigError for a capacity that cannot work."""
    room = spec.room(geometry, world_size)
    if room is None:
        return None
    token_bytes = sum(
        _chunk_bytes(room, geometry, group) / geometry.chunk_size_of(group) for group in geometry.attention
    )
    snapshot_bytes = room.object_bytes(geometry.max_snapshot_bytes) if geometry.recurrent else 0
    conversation_bytes = _conversation_bytes(room, geometry, conversation)
    return TierCapacity(
        name=spec.settings.name,
        capacity_bytes=room.capacity_bytes,
        chunk_tokens=geometry.chunk_size,
        restore_unit_tokens=geometry.restore_unit,
        token_bytes=token_bytes,
        snapshot_bytes=snapshot_bytes,
        num_tokens=int(room.capacity_bytes / token_bytes) if token_bytes else 0,
        num_snapshots=room.capacity_bytes // snapshot_bytes if snapshot_bytes else 0,
        conversation_bytes=conversation_bytes,
        num_conversations=room.capacity_bytes // conversation_bytes if conversation_bytes else 0,
        geometry=geometry.describe(),
    )


def _chunk_bytes(room: TierRoom, geometry: Geometry, group: Group) -> int:
    return room.object_bytes(geometry.chunk_bytes(group))


def _conversation_bytes(room: TierRoom, geometry: Geometry, conversation: Conversation) -> int:
    """Whole chunks of all attention, and the largest snapshot for each state that is kept."""
    chunks = sum(
        conversation.num_tokens // geometry.chunk_size_of(group) * _chunk_bytes(room, geometry, group)
        for group in geometry.attention
    )
    if not geometry.recurrent:
        return chunks
    return chunks + conversation.num_snapshots * room.object_bytes(geometry.max_snapshot_bytes)
