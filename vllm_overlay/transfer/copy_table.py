# SPDX-License-Identifier: Apache-2.0
"""Copies as a table of numbers: what a copy kernel or a copy engine takes, on a device or in host memory.

A place is an address, or an offset where a docstring says so. All numbers but those of rows are in bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

_SOURCE, _TARGET, _ROWS, _ROW_BYTES, _SOURCE_STEP, _TARGET_STEP = range(6)
NUM_FIELDS = 6
MAX_VECTOR_BYTES = 16


def _field(place: int) -> Any:
    """These numbers of all copies of a table."""
    return property(lambda table: table.fields[place])


@dataclass(frozen=True, slots=True, eq=False)
class CopyTable:
    """Copies that do not overlap, each of ``rows`` rows of ``row_bytes``.

    Row i lies ``i * source_step`` after the source and goes to ``i * target_step`` after the target. ``fields`` has
    the shape (6, copies), in the order of the properties below.
    """

    fields: Numbers

    sources = _field(_SOURCE)
    targets = _field(_TARGET)
    rows = _field(_ROWS)
    row_bytes = _field(_ROW_BYTES)
    source_steps = _field(_SOURCE_STEP)
    target_steps = _field(_TARGET_STEP)

    @classmethod
    def of(cls, copies: Sequence[tuple[int, int, int, int, int, int]]) -> "CopyTable":
        """A table of (source, target, rows, bytes a row, source step, target step) of each copy."""
        return cls(np.array(copies, dtype=np.int64).reshape(-1, NUM_FIELDS).T.copy())

    @classmethod
    def joined(cls, tables: Sequence["CopyTable"]) -> "CopyTable":
        """All copies of these tables, one table after the other."""
        if len(tables) == 1:
            return tables[0]
        return cls(np.concatenate([table.fields for table in tables], axis=1)) if tables else cls.of(())

    def __len__(self) -> int:
        return int(self.fields.shape[1])

    @property
    def num_bytes(self) -> int:
        return int((self.rows * self.row_bytes).sum())

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest copy."""
        return int((self.rows * self.row_bytes).max(initial=0))

    @property
    def vector_bytes(self) -> int:
        """The largest power of two, up to 16, that divides every place, step and row."""
        numbers = np.delete(self.fields, _ROWS, axis=0)
        low_bits = int(np.bitwise_or.reduce(numbers, axis=None, initial=MAX_VECTOR_BYTES))
        return low_bits & -low_bits

    def moved(self, source: Numbers | int, target: Numbers | int) -> "CopyTable":
        """The same copies, with these bytes added to each one's source and target."""
        fields = self.fields.copy()
        fields[_SOURCE] += source
        fields[_TARGET] += target
        return CopyTable(fields)

    def chosen(self, which: npt.NDArray[np.bool_]) -> "CopyTable":
        return CopyTable(self.fields[:, which])

    def reversed(self) -> "CopyTable":
        """The same copies from targets to sources."""
        return CopyTable(self.fields[[_TARGET, _SOURCE, _ROWS, _ROW_BYTES, _TARGET_STEP, _SOURCE_STEP]])

    def merged(self) -> "CopyTable":
        """Joins single rows that follow each other in the table and on both sides."""
        if len(self) < 2:
            return self
        ends = self.row_bytes[:-1]
        continues = (
            (self.rows[:-1] == 1)
            & (self.rows[1:] == 1)
            & (self.sources[:-1] + ends == self.sources[1:])
            & (self.targets[:-1] + ends == self.targets[1:])
        )
        first = np.flatnonzero(np.concatenate([[True], ~continues]))
        fields = self.fields[:, first]
        fields[_ROW_BYTES] = np.add.reduceat(self.row_bytes, first)
        return CopyTable(fields)

    def in_rows(self) -> "CopyTable":
        """Every row as a copy of its own."""
        if (self.rows == 1).all():
            return self
        fields, row = self._repeated(self.rows)
        fields[_SOURCE] += row * fields[_SOURCE_STEP]
        fields[_TARGET] += row * fields[_TARGET_STEP]
        fields[_ROWS] = 1
        return CopyTable(fields)

    def cut_at(self, unit_bytes: int) -> "CopyTable":
        """Cuts the copies so that no row and no copy goes beyond a multiple of ``unit_bytes`` of the targets, which are
        offsets.

        A copy becomes the rows that lie wholly in each unit, and the pieces of those that lie in several.
        """
        steps = np.where(self.rows == 1, self.row_bytes, self.target_steps)
        first = self.targets // unit_bytes
        last = (self.targets + (self.rows - 1) * steps + self.row_bytes - 1) // unit_bytes
        crosses = first != last
        if not crosses.any():
            return self
        counts = (last - first + 1)[crosses]
        fields, number = self.chosen(crosses)._repeated(counts)
        steps = np.repeat(steps[crosses], counts)
        start = (number + np.repeat(first[crosses], counts)) * unit_bytes - fields[_TARGET]
        end = start + unit_bytes
        copies = CopyTable(fields)
        whole = np.maximum(0, -(-start // steps))
        num_whole = np.minimum(fields[_ROWS], (end - fields[_ROW_BYTES]) // steps + 1) - whole
        split = (end - 1) // steps
        begins_here = (split * steps >= start) & (split < fields[_ROWS])
        is_split = begins_here & (split * steps + fields[_ROW_BYTES] > end)
        pieces = copies._rows_from(split, np.ones_like(split)).chosen(is_split)
        return CopyTable.joined(
            [
                self.chosen(~crosses),
                copies._rows_from(whole, num_whole).chosen(num_whole > 0),
                pieces._cut_rows(pieces.targets, unit_bytes),
            ]
        )

    def _rows_from(self, first: Numbers, count: Numbers) -> "CopyTable":
        """So many rows of each copy, from the given one on."""
        table = self.moved(first * self.source_steps, first * self.target_steps)
        table.fields[_ROWS] = count
        return table

    def in_pieces(self, max_bytes: int) -> "CopyTable":
        """Cuts rows so that none is longer than ``max_bytes``."""
        rows = self.in_rows()
        if (rows.row_bytes <= max_bytes).all():
            return rows
        return rows._cut_rows(np.zeros(len(rows), dtype=np.int64), max_bytes)

    def _cut_rows(self, offsets: Numbers, unit_bytes: int) -> "CopyTable":
        """Single rows that begin at these offsets, cut at the multiples of ``unit_bytes``."""
        first = offsets // unit_bytes
        counts = (offsets + self.row_bytes - 1) // unit_bytes - first + 1
        fields, piece = self._repeated(counts)
        offsets, first = np.repeat(offsets, counts), np.repeat(first, counts)
        starts = np.maximum(offsets, (first + piece) * unit_bytes)
        ends = np.minimum(offsets + fields[_ROW_BYTES], (first + piece + 1) * unit_bytes)
        fields[_SOURCE] += starts - offsets
        fields[_TARGET] += starts - offsets
        fields[_ROW_BYTES] = ends - starts
        return CopyTable(fields)

    def _repeated(self, counts: Numbers) -> tuple[Numbers, Numbers]:
        """The fields of each copy so many times, and the number of each among its own."""
        number = np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(self.fields, counts, axis=1), number
