# SPDX-License-Identifier: Apache-2.0
"""What the matrix found: kept in results.json, shown in docs/models.md between two comments."""

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
    """Markdown: the models that were exact in every column, then what was found of each other one."""
    rest = {row.name: found for row in ROWS if (found := _not_exact(results[row.name]))}
    exact = [f"- **{row.name}**: {row.layers}" for row in ROWS if row.name not in rest]
    others = [f"- **{row.name}**: {row.layers}. {rest[row.name]}." for row in ROWS if row.name in rest]
    return "\n".join(["Exact, whatever was asked:", "", *exact, "", "Others:", "", *others, ""])


def _not_exact(cells: dict[Column, Cell]) -> str:
    """Each finding once, with its columns unless it is of all of them; empty if all are exact."""
    found: dict[Cell, list[str]] = {}
    for column, cell in cells.items():
        if cell.verdict is not Verdict.EXACT:
            found.setdefault(cell, []).append(column)
    return "; ".join(f"*{cell.verdict}*{_those(columns)}: {cell.note}" for cell, columns in found.items())


def _those(columns: list[str]) -> str:
    return "" if len(columns) == len(Column) else f" ({', '.join(columns)})"


def shown() -> str:
    """What the page has."""
    return parts_of(PAGE.read_text())["models"]


def show(results: Results) -> None:
    """Puts it into the page."""
    PAGE.write_text(with_parts(PAGE.read_text(), {"models": render(results)}))
