# SPDX-License-Identifier: Apache-2.0
"""What a tier holds, how prompts are cut for it, and what is under way: the levels that the scheduler reports."""

from vllm_overlay.tally import Tally
from vllm_overlay.tiers.base import TierUsage


class Gauges:
    """Called by the scheduler's half alone, with every report."""

    def __init__(self, tally: Tally, **sizes: float) -> None:
        """``sizes``: levels that stay as they are."""
        self._tally = tally
        self._sizes = sizes
        self._num_evicted = 0
        """As far as it is counted."""
        self._levels: dict[str, float] = {}
        """As last put into the tally."""

    def record(self, usage: TierUsage, **levels: float) -> None:
        """Puts the evictions since the last call into the tally, and all levels if one has changed or if something was
        counted: most steps have nothing to report."""
        self._tally.count("evicted_objects", usage.evicted_objects - self._num_evicted)
        self._num_evicted = usage.evicted_objects
        held = {"objects": usage.num_objects, "used_bytes": usage.used_bytes, "capacity_bytes": usage.capacity_bytes}
        if (now := held | levels) != self._levels or not self._tally.is_empty():
            self._levels = now
            self._tally.gauges.update(now, **self._sizes)
