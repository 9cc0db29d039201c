# SPDX-License-Identifier: Apache-2.0
"""The host memory between the KV cache and the disk. Stores and loads share it, and neither locks the other out."""

from vllm_overlay.config import GIB, MIB, ConfigError, parse_bytes
from vllm_overlay.tiers.memory import Bytes, HostBuffer, HostPool, UnitAllocator, units_needed

LEAST_BYTES, MOST_BYTES = 256 * MIB, 4 * GIB
STEPS = 4
"""Whose stores fit, less the quarter that is never given to them: a fast engine's long prompt, or most of it."""


def staging_size(setting: int | str, step_bytes: int = 0) -> int:
    """Bytes, from ``staging_bytes`` and what a full step stores in one rank: chunks, and a prompt's state.

    With less, a prompt's later chunks are dropped on a fast GPU, and its state, without which none is of use.
    """
    return parse_bytes(setting, "staging_bytes") or min(max(LEAST_BYTES, STEPS * step_bytes), MOST_BYTES)


class Staging:
    """Buffers of a worker. Not thread-safe: the worker calls it under its lock.

    A quarter of the units, and at least the largest object's, is never given to stores. So a load waits only for
    stores and loads that end by themselves. Raises ConfigError when one store and one load do not fit together.
    """

    def __init__(self, staging_bytes: int, unit_bytes: int, max_object_bytes: int) -> None:
        needed = units_needed(max_object_bytes, unit_bytes)
        num_units = staging_bytes // unit_bytes
        if num_units < 2 * needed:
            raise ConfigError(
                f"staging_bytes={staging_bytes} cannot hold a store and a load of the largest object "
                f"({max_object_bytes} bytes): set it to at least {2 * needed * unit_bytes}"
            )
        self.max_object_bytes = max_object_bytes
        self._pool = HostPool(num_units, unit_bytes)
        self._free = UnitAllocator(num_units)
        self._left_for_stores = num_units - max(num_units // 4, needed)

    @property
    def memory(self) -> Bytes:
        """Of all buffers, (units, bytes a unit)."""
        return self._pool.array

    def for_store(self, num_bytes: int) -> HostBuffer | None:
        if units_needed(num_bytes, self._pool.unit_bytes) > self._left_for_stores:
            return None
        buffer = self.for_load(num_bytes)
        if buffer is not None:
            self._left_for_stores -= len(buffer.units)
        return buffer

    def for_load(self, num_bytes: int) -> HostBuffer | None:
        units = self._free.allocate(units_needed(num_bytes, self._pool.unit_bytes))
        return None if units is None else self._pool.buffer(units, num_bytes)

    def end_store(self, buffer: HostBuffer) -> None:
        self._left_for_stores += len(buffer.units)
        self.end_load(buffer)

    def end_load(self, buffer: HostBuffer) -> None:
        self._free.free(buffer.units)
