# SPDX-License-Identifier: Apache-2.0
"""Where the objects of one submission lie in host memory: their units in a row, as if they followed each other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_overlay.tiers.memory import HostBuffer
from vllm_overlay.transfer.copy_table import CopyTable, Numbers


@dataclass(frozen=True, slots=True)
class HostUnits:
    """Unit n is at ``addresses[n]`` and stands for the offsets from ``n * unit_bytes`` on.

    Each object begins with a unit. Its offsets go from ``starts`` to ``ends``.
    """

    unit_bytes: int
    addresses: Numbers
    starts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, buffers: Sequence[HostBuffer]) -> "HostUnits":
        """The units of buffers of one size.

        Raises:
            IndexError: A buffer's units are not in its pool.
            ValueError: They do not hold its bytes, or the buffers are of pools with different units.
        """
        sizes = {buffer.array.shape[1] for buffer in buffers}
        if len(sizes) > 1:
            raise ValueError(f"units of {sorted(sizes)} bytes in one submission")
        unit_bytes = sizes.pop() if sizes else 1
        addresses: list[int] = []
        starts, ends = [], []
        for buffer in buffers:
            num_units, step = buffer.array.shape[0], buffer.array.strides[0]
            if len(buffer.units) * unit_bytes < buffer.num_bytes:
                raise ValueError(
                    f"{len(buffer.units)} units of {unit_bytes} bytes do not hold {buffer.num_bytes} bytes"
                )
            if buffer.units and not 0 <= min(buffer.units) <= max(buffer.units) < num_units:
                raise IndexError(f"units {buffer.units} are not in a pool of {num_units} units")
            first = buffer.array.ctypes.data
            starts.append(len(addresses) * unit_bytes)
            ends.append(starts[-1] + buffer.num_bytes)
            addresses += [first + unit * step for unit in buffer.units]
        return cls(unit_bytes, np.array(addresses, dtype=np.int64), starts, ends)

    def located(self, table: CopyTable) -> CopyTable:
        """Copies whose targets are offsets, cut where a unit ends, to addresses in host memory."""
        table = table.cut_at(self.unit_bytes)
        place = table.targets // self.unit_bytes
        return table.moved(0, self.addresses[place] - place * self.unit_bytes)

    def in_order(self) -> CopyTable:
        """One copy for each object, from offset to offset."""
        return CopyTable.of(
            [
                (start, start, 1, end - start, end - start, end - start)
                for start, end in zip(self.starts, self.ends, strict=True)
                if start < end
            ]
        )
