# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half remembers of one request between its first lookup and its end."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_overlay.connector.lora.keys import RequestNames
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LONGEST_PAUSE_STEPS = 64


@dataclass(slots=True)
class TrackedRequest:
    """``cursors`` has for each attention group, by vLLM's id, the tokens that were considered for storing."""

    request: "Request"
    names: RequestNames
    num_local: int
    failed_loads: int = 0
    cursors: dict[int, int] = field(default_factory=dict)
    stalled_at: ObjectId | None = None
    """The chunk that got no room, so that it is counted once."""
    _failed_stores: int = 0
    _store_again_at: int = 0

    def has_complete_chunk(self, geometry: Geometry, computed_tokens: int) -> bool:
        """Whether some group may have a chunk to store."""
        return any(
            computed_tokens - self.cursors.get(group.group_id, 0) >= geometry.chunk_size_of(group)
            for group in geometry.attention
        )

    def set_back(self, group_id: int, start_tokens: int) -> None:
        """Consider the tokens from ``start_tokens`` on once more: without their chunk no later one can be found."""
        self.cursors[group_id] = min(self.cursors.get(group_id, 0), start_tokens)

    def store_failed(self, step: int) -> None:
        """Try again in the next step, and after ever more steps while that fails too."""
        self._failed_stores += 1
        self._store_again_at = step + min(2 ** min(self._failed_stores - 1, 16), _LONGEST_PAUSE_STEPS)

    def store_succeeded(self) -> None:
        self._failed_stores = 0

    def may_store(self, step: int) -> bool:
        """Whether the pause after failed stores is over."""
        return step >= self._store_again_at
