# SPDX-License-Identifier: Apache-2.0
"""What a tier holds, how prompts are cut for it, and what is under way: the levels that the scheduler reports."""

from vllm_overlay.connector.pending import PendingReports
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tally import Tally
from vllm_overlay.tiers.base import TierManager

_LEVELS = ("objects", "used_bytes", "capacity_bytes", "pending_stores", "pending_loads", "loads_paused")


class Gauges:
    """Called by the scheduler's half alone, with every report."""

    def __init__(
        self, tally: Tally, geometry: Geometry, tier: TierManager, world_size: int, lookahead_units: int = 0
    ) -> None:
        self._tally = tally
        self._tier = tier
        self._sizes = {
            "token_bytes": geometry.token_bytes * world_size,
            "state_bytes": geometry.state_bytes * world_size,
            "chunk_tokens": geometry.chunk_size,
            "restore_unit_tokens": geometry.restore_unit,
            "dropped_tokens": lookahead_units * geometry.match_unit,
            "block_tokens": max(group.block_size for group in geometry.groups),
        }
        self._num_evicted = 0
        """As far as it is counted."""
        self._levels: tuple[float, ...] = ()
        """As last put into the tally."""

    def record(self, pending: PendingReports, *, are_loads_paused: bool) -> None:
        """Puts the evictions since the last call into the tally, and all levels if one has changed or if something was
        counted: most steps have nothing to report."""
        usage = self._tier.usage()
        if evicted := usage.evicted_objects - self._num_evicted:
            self._num_evicted = usage.evicted_objects
            self._tally.count("evicted_objects", evicted)
        tier = usage.num_objects, usage.used_bytes, usage.capacity_bytes
        levels = *tier, pending.num_stores, pending.num_loads, int(are_loads_paused)
        if levels == self._levels and self._tally.is_empty():
            return
        self._levels = levels
        self._tally.gauges.update(zip(_LEVELS, levels, strict=True))
        self._tally.gauges.update(self._sizes)
