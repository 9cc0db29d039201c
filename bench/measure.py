# SPDX-License-Identifier: Apache-2.0
"""Timing side by side, and tables."""

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Clock = Callable[[], float]


@dataclass(slots=True)
class Subject:
    """What is timed: ``run`` moves ``num_bytes``. ``prepare`` and ``clean_up`` come around it, untimed."""

    name: str
    num_bytes: int
    run: Callable[[], None]
    prepare: Callable[[], None] = lambda: None
    clean_up: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Of the whole process, user and system."""

    @property
    def gb_per_s(self) -> float:
        """The median."""
        return self.num_bytes / statistics.median(self.seconds) / 1e9

    def cpu_us_of(self, count: int) -> float:
        """The median of the process's CPU microseconds for each of ``count`` objects."""
        return statistics.median(self.cpu_seconds) / count * 1e6

    def share_of(self, reference: "Subject") -> float:
        """This bandwidth over the reference's, the median of the shares of each round."""
        rate = self.num_bytes / reference.num_bytes
        pairs = zip(self.seconds, reference.seconds, strict=True)
        return statistics.median(rate * theirs / own for own, theirs in pairs)


def take_turns(sides: Sequence[Sequence[Subject]], rounds: int, clock: Clock = time.perf_counter) -> None:
    """Times every subject once a round, after one round that does not count: whatever else the machine does in a
    round hits all of them. A side's subjects come in their order; which side begins changes from round to round."""
    for number in range(rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            for subject in side:
                subject.prepare()
                start, cpu_start = clock(), time.process_time()
                subject.run()
                seconds, cpu_seconds = clock() - start, time.process_time() - cpu_start
                subject.clean_up()
                if number:
                    subject.seconds.append(seconds)
                    subject.cpu_seconds.append(cpu_seconds)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies, from 0 to 1."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, padded so that it reads well in a terminal."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def ratio(own: Sequence[float], first: Sequence[float]) -> str:
    """The median of the rounds' ratios, and its interval."""
    return interval([a / b for a, b in zip(own, first, strict=True)])


def interval(found: Sequence[float]) -> str:
    """The median, and its interval of at least 95 %, by how many lie above and below."""
    found = sorted(found)
    number, rank, outside = len(found), 0, 0.0
    while rank < (number - 1) // 2:
        outside += 2 * math.comb(number, rank) / 2**number
        if outside > 0.05:
            break
        rank += 1
    low = max(rank - 1, 0)
    return f"{statistics.median(found):.2f} ({found[low]:.2f} to {found[-1 - low]:.2f})"


def write_json(path: Path, **figures: Any) -> None:
    """With what the machine is."""
    figures |= {"machine": platform.platform(), "cores": os.cpu_count()}
    path.write_text(json.dumps(figures, indent=2) + "\n")
