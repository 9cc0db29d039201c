# SPDX-License-Identifier: Apache-2.0
"""An object's bytes in host memory from its first to its last, across the borders of its units."""

import ctypes

from vllm_overlay.tiers.memory import Bytes, HostBuffer
from vllm_overlay.transfer import cpu_kernels


class ObjectStream:
    """Goes through one host buffer, from its first byte on. Units that follow each other are one piece.

    Made by the CPU transfer for one copy. Addresses are this process's, and who gives them keeps their memory alive.
    """

    def __init__(self, buffer: HostBuffer) -> None:
        """Raises ValueError when the buffer's units do not hold its bytes."""
        self._flat = buffer.array.view()
        self._flat.shape = (-1,)  # raises where a reshape would copy
        self._address = self._flat.ctypes.data
        self._ranges = _ranges(buffer)
        self._index = 0
        self._offset = 0

    @property
    def piece_bytes(self) -> int:
        """How many of the next bytes lie in one piece."""
        if self._index == len(self._ranges):
            return 0
        start, end = self._ranges[self._index]
        return end - start - self._offset

    def take(self, num_bytes: int) -> Bytes:
        """The next ``num_bytes``, at most ``piece_bytes``, where they lie."""
        start = self._advance(num_bytes)
        return self._flat[start : start + num_bytes]

    def copy(self, address: int, num_bytes: int, to_host: bool) -> None:
        """Copies bytes from there into the object, or the object's to there. Raises ValueError when it is shorter."""
        end = address + num_bytes
        while address < end:
            size = min(end - address, self.piece_bytes)
            if not size:
                raise ValueError("the object's placement is longer than its buffer")
            place = self._address + self._advance(size)
            source, target = (address, place) if to_host else (place, address)
            _copy(source, target, size)
            address += size

    def check_end(self) -> None:
        """Raises ValueError when bytes are left."""
        if self._index != len(self._ranges):
            raise ValueError("the object's placement is shorter than its buffer")

    def _advance(self, num_bytes: int) -> int:
        """Goes on by ``num_bytes`` of this piece. Returns where they begin in the pool."""
        start, end = self._ranges[self._index]
        start += self._offset
        self._offset += num_bytes
        if start + num_bytes == end:
            self._index += 1
            self._offset = 0
        return start


def _ranges(buffer: HostBuffer) -> list[tuple[int, int]]:
    """Where the object's bytes lie in the pool, in order."""
    num_units, unit_bytes = buffer.array.shape
    ranges: list[tuple[int, int]] = []
    left = buffer.num_bytes
    for unit in buffer.units:
        if not 0 <= unit < num_units:
            raise IndexError(f"unit {unit} is not in a pool of {num_units} units")
        start, left = unit * unit_bytes, left - (take := min(left, unit_bytes))
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], start + take)
        else:
            ranges.append((start, start + take))
    if left:
        raise ValueError(f"{len(buffer.units)} units of {unit_bytes} bytes do not hold {buffer.num_bytes} bytes")
    return ranges


def _copy(source: int, target: int, num_bytes: int) -> None:
    whole = 0 if target % cpu_kernels.LINE else num_bytes - num_bytes % cpu_kernels.LINE
    if whole:
        cpu_kernels.copy_bytes(source, target, whole)
    if whole < num_bytes:
        ctypes.memmove(target + whole, source + whole, num_bytes - whole)
