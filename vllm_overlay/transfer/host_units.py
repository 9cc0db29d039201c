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
        arrays = {id(buffer.array): buffer.array for buffer in buffers}
        sizes = {array.shape[1] for array in arrays.values()}
        if len(sizes) > 1:
            raise ValueError(f"units of {sorted(sizes)} bytes in one submission")
        unit_bytes = sizes.pop() if sizes else 1
        pools = {key: (array.ctypes.data, array.strides[0], array.shape[0]) for key, array in arrays.items()}
        addresses: list[int] = []
        starts, ends = [], []
        for buffer in buffers:
            units, num_bytes = buffer.units, buffer.num_bytes
            first, step, num_units = pools[id(buffer.array)]
            if len(units) * unit_bytes < num_bytes:
                raise ValueError(f"{len(units)} units of {unit_bytes} bytes do not hold {num_bytes} bytes")
            if units and not 0 <= min(units) <= max(units) < num_units:
                raise IndexError(f"units {units} are not in a pool of {num_units} units")
            start = len(addresses) * unit_bytes
            starts.append(start)
            ends.append(start + num_bytes)
            addresses += [first + unit * step for unit in units]
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
