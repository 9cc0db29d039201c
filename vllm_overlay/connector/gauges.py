# SPDX-License-Identifier: Apache-2.0
"""What a tier holds, how prompts are cut for it, and what is under way: the levels that the scheduler reports."""

from vllm_overlay.connector.metrics import OffloadStats
from vllm_overlay.connector.pending import PendingReports
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tiers.base import TierManager


class Gauges:
    """Called by the scheduler's half alone, with every report."""

    def __init__(self, stats: OffloadStats, geometry: Geometry, tier: TierManager, world_size: int) -> None:
        self._stats = stats
        self._geometry = geometry
        self._tier = tier
        self._world_size = world_size
        self._num_evicted = 0
        """As far as it is counted."""

    def record(self, pending: PendingReports, *, are_loads_paused: bool) -> None:
        """Puts all levels into the stats, and the evictions since the last call."""
        usage, geometry = self._tier.usage(), self._geometry
        levels = {
            "objects": usage.num_objects,
            "used_bytes": usage.used_bytes,
            "capacity_bytes": usage.capacity_bytes,
            "token_bytes": geometry.token_bytes * self._world_size,
            "state_bytes": geometry.state_bytes * self._world_size,
            "chunk_tokens": geometry.chunk_size,
            "restore_unit_tokens": geometry.restore_unit,
            "block_tokens": max(group.block_size for group in geometry.groups),
            "pending_stores": pending.num_stores,
            "pending_loads": pending.num_loads,
            "loads_paused": int(are_loads_paused),
        }
        for name, level in levels.items():
            self._stats.gauge(name, level)
        if evicted := usage.evicted_objects - self._num_evicted:
            self._num_evicted = usage.evicted_objects
            self._stats.count("evicted_objects", evicted)
