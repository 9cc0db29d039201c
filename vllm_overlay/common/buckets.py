# SPDX-License-Identifier: Apache-2.0
"""Observations of a histogram on their way to the front end: added up, lossless for Prometheus, of bounded size."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Buckets:
    """How many observations fell into each bucket, and their sum there.

    A list of the observations would be as exact, but has no bound when reports are rare.
    """

    bounds: tuple[float, ...]
    """Upper bounds, inclusive and ascending, as Prometheus has them; what is above the last has a bucket too."""
    cells: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Index of a bucket -> number and sum."""

    def observe(self, value: float) -> None:
        self._put(bisect_left(self.bounds, value), 1, value)

    def _put(self, index: int, number: int, total: float) -> None:
        known_number, known_total = self.cells.get(index, (0, 0.0))
        self.cells[index] = known_number + number, known_total + total

    def add(self, other: "Buckets") -> None:
        for index, (number, total) in other.cells.items():
            self._put(index, number, total)

    @property
    def count(self) -> int:
        return sum(number for number, _ in self.cells.values())

    @property
    def sum(self) -> float:
        return sum(total for _, total in self.cells.values())

    def observations(self) -> Iterator[float]:
        """As many as were made, in the same buckets, with the same sum: the mean of each bucket, so often."""
        for index, (number, total) in self.cells.items():
            # Rounding must not carry a mean over the bound.
            highest = self.bounds[index] if index < len(self.bounds) else float("inf")
            yield from [min(total / number, highest)] * number

    def to_list(self) -> list[tuple[int, int, float]]:
        return [(index, number, total) for index, (number, total) in self.cells.items()]

    @classmethod
    def from_list(cls, bounds: tuple[float, ...], data: object) -> "Buckets":
        """From what ``to_list`` wrote in another process; what is none of it is left out."""
        buckets = cls(bounds)
        for cell in data if isinstance(data, list | tuple) else ():
            match cell:
                case (int(index), int(number), int() | float() as total) if total >= 0:
                    if 0 <= index <= len(bounds) and number > 0:
                        buckets._put(index, number, total)
        return buckets
