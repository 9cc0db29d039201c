# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/metrics.md, for the tests that compare them with the code and with a server."""

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


@dataclass(frozen=True, slots=True)
class Row:
    """One metric. ``labels`` are those beside vLLM's own and ``connector``."""

    name: str
    kind: str
    unit: str
    labels: tuple[str, ...]
    meaning: str


def documented_metrics() -> list[Row]:
    """The rows of both families, in the order of the page."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `vllm:") and line.count("|") == 6]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        Row(name.strip("`"), kind, unit, tuple(labels.replace("`", "").replace(",", " ").split()), meaning)
        for name, kind, unit, labels, meaning in cells
    ]
