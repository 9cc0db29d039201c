# SPDX-License-Identifier: Apache-2.0
"""The host's memory: what the tiers take of it, and what vLLM takes beside them where it serves on a CPU."""

from dataclasses import dataclass

from vllm_overlay.config import GIB
from vllm_overlay.planning.question import EngineLayout, Flags

_VLLM_SHARE = 0.92
"""What ``--gpu-memory-utilization`` is in vLLM 0.32.0 unless given. On a CPU it is a share of the host's memory."""
_LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Of all engines on this host, in bytes. ``free_bytes``: before any of them has started."""

    flags: Flags
    layout: EngineLayout
    tier_bytes: int
    """Of one engine's tiers."""
    free_bytes: int

    @property
    def tiers_bytes(self) -> int:
        return self.tier_bytes * self.flags.num_engines

    @property
    def vllm_bytes(self) -> int:
        """What vLLM will take for its own KV cache, with its weights where a share says how much. 0 on a GPU."""
        share = self.flags.gpu_memory_utilization or _VLLM_SHARE
        return self._num_workers * (self.flags.kv_cache_memory_bytes or int(share * self.layout.node_bytes))

    @property
    def is_short(self) -> bool:
        """The tiers would find too little when vLLM has what it takes."""
        return bool(self.layout.node_bytes) and self.tiers_bytes + self.vllm_bytes > self.free_bytes

    @property
    def share_that_fits(self) -> float | None:
        """For ``--gpu-memory-utilization``: leaves the tiers their room, and a sixteenth, or 3 GiB, to all processes
        beside the workers. None: there is none."""
        rest = max(3 * GIB, self.free_bytes // 16)
        each = (self.free_bytes - self.tiers_bytes - rest) / self._num_workers
        share = int(100 * each / self.layout.node_bytes) / 100
        return min(share, _VLLM_SHARE) if share >= _LEAST_SHARE else None

    @property
    def chosen_share(self) -> float | None:
        """What a command should have that says nothing itself. None: vLLM's own is right, or nothing would be."""
        says = self.flags.kv_cache_memory_bytes or self.flags.gpu_memory_utilization
        return None if says or not self.is_short else self.share_that_fits

    @property
    def _num_workers(self) -> int:
        return self.flags.num_engines * self.flags.tensor_parallel_size
