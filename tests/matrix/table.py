# SPDX-License-Identifier: Apache-2.0
"""The matrix as a table: kept in results.json, shown in docs/models.md between two markers."""

import json
from pathlib import Path

from devtools.docs.generated import parts_of, with_parts
from tests.matrix.cells import Cell, Column, Verdict
from tests.matrix.rows import ROWS
from tests.python_path import REPOSITORY

RESULTS = Path(__file__).with_name("results.json")
PAGE = REPOSITORY / "docs" / "models.md"

Results = dict[str, dict[Column, Cell]]
"""By the row's name."""


def load() -> Results:
    """What was found when each row was run last; ``KeyError`` or ``ValueError`` if the file is not one of ours."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {
        name: {Column(column): Cell(Verdict(verdict), note) for column, (verdict, note) in cells.items()}
        for name, cells in rows.items()
    }


def save(results: Results) -> None:
    """In the order of the rows, so that a new run changes only what it found anew."""
    ordered = {row.name: results[row.name] for row in ROWS if row.name in results}
    plain = {
        name: {column: [cells[column].verdict, cells[column].note] for column in Column if column in cells}
        for name, cells in ordered.items()
    }
    RESULTS.write_text(json.dumps(plain, indent=1) + "\n")


def render(results: Results) -> str:
    """Markdown: a row a model, and a numbered reason for each cell that is not exact."""
    reasons: list[str] = []
    lines = [f"| | {' | '.join(Column)} |", f"| --- |{' --- |' * len(Column)}"]
    for row in ROWS:
        cells = [_words(column, results[row.name][column], reasons) for column in Column]
        lines.append(f"| **{row.name}**: {row.layers} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *notes, ""] if notes else [*lines, ""])


def _words(column: Column, cell: Cell, reasons: list[str]) -> str:
    if cell.verdict is Verdict.EXACT:
        return "yes" if column is Column.WRONG_BYTES else "exact"
    if cell.note not in reasons:
        reasons.append(cell.note)
    return f"{cell.verdict} ({reasons.index(cell.note) + 1})"


def shown() -> str:
    """The table that the page has."""
    return parts_of(PAGE.read_text())["models"]


def show(results: Results) -> None:
    """Puts the table into the page."""
    PAGE.write_text(with_parts(PAGE.read_text(), {"models": render(results)}))
