# SPDX-License-Identifier: Apache-2.0
"""What a connector has counted, between two reports, on its way from any process to the front end."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from vllm_overlay.metrics import BUCKETS


@dataclass(slots=True)
class Buckets:
    """How many observations fell into each bucket, and their sum there.

    A list of the observations would be as exact, but has no bound when reports are rare.
    """

    bounds: tuple[float, ...]
    """Upper bounds, inclusive and ascending, as Prometheus has them; what is above the last has a bucket too."""
    cells: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Index of a bucket -> number and sum."""

    def observe(self, *values: float) -> None:
        for value in values:
            index = bisect_left(self.bounds, value)
            number, total = self.cells.get(index, (0, 0.0))
            self.cells[index] = number + 1, total + value

    def add(self, other: "Buckets") -> None:
        for index, (number, total) in other.cells.items():
            known_number, known_total = self.cells.get(index, (0, 0.0))
            self.cells[index] = known_number + number, known_total + total

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


@dataclass(slots=True)
class Tally:
    """Increments and levels since the last report. Tallies of ranks and of steps add up.

    Keys are a metric's name in metrics.py without the prefix of its family, or "name:label" where it has a label of
    its own: a reason, a hook or a source.
    """

    counters: dict[str, float] = field(default_factory=dict)
    """What is not zero."""
    histograms: dict[str, Buckets] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    """Only the scheduler's side reports levels, and the last one stays."""
    sent_at: float = field(default=0.0, compare=False)
    """The engine's ``time.time()`` when this went over the wire: one step's report may overtake that of the step
    before, because each goes to one of several API servers."""

    def count(self, metric: str, amount: float = 1, label: str = "") -> None:
        if amount:
            key = f"{metric}:{label}" if label else metric
            self.counters[key] = self.counters.get(key, 0) + amount

    def observe(self, metric: str, *values: float, label: str = "") -> None:
        self._buckets(f"{metric}:{label}" if label else metric).observe(*values)

    def gauge(self, metric: str, value: float) -> None:
        self.gauges[metric] = value

    def total(self, metric: str) -> float:
        """One counter over all its labels."""
        return sum([amount for key, amount in self.counters.items() if key.partition(":")[0] == metric])

    def add(self, other: "Tally") -> None:
        for key, amount in other.counters.items():
            self.counters[key] = self.counters.get(key, 0) + amount
        for key, part in other.histograms.items():
            self._buckets(key).add(part)
        self.gauges.update(other.gauges)

    def take(self) -> "Tally":
        """What was counted since the last call."""
        taken = Tally(self.counters, self.histograms, self.gauges)
        self.counters, self.histograms, self.gauges = {}, {}, {}
        return taken

    def is_empty(self) -> bool:
        return not (self.counters or self.histograms or self.gauges)

    def to_dict(self) -> dict[str, Any]:
        """As it goes over the wire."""
        cells = {key: [(index, *cell) for index, cell in part.cells.items()] for key, part in self.histograms.items()}
        return {
            "counters": dict(self.counters),
            "histograms": cells,
            "gauges": dict(self.gauges),
            "sent_at": time.time(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """From what ``to_dict`` wrote in another process."""
        tally = cls(dict(data["counters"]), {}, dict(data["gauges"]), data["sent_at"])
        for key, cells in data["histograms"].items():
            tally._buckets(key).cells.update({index: (number, total) for index, number, total in cells})
        return tally

    def _buckets(self, key: str) -> Buckets:
        if (buckets := self.histograms.get(key)) is None:
            buckets = self.histograms[key] = Buckets(BUCKETS[metric_of(key)])
        return buckets


class ReportTimes:
    """When one connector reports: at most four times a second, as each report costs the engine and the front end.

    By the clock, so that a connector inside another one may report whenever that one does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: in seconds."""
        self._clock = clock
        self._quarter = 0

    def is_due(self) -> bool:
        """Whether a quarter of a second has begun in which there was no report. It is taken to be made now."""
        quarter = int(4 * self._clock())
        is_due, self._quarter = quarter != self._quarter, quarter
        return is_due


def metric_of(key: str) -> str:
    return key.partition(":")[0]
