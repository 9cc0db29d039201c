# SPDX-License-Identifier: Apache-2.0
"""The list of docs/models.md is what the matrix found, and the README counts its rows right."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.matrix import __main__ as matrix
from tests.matrix import table
from tests.matrix.cells import Cell, Column, Verdict
from tests.matrix.rows import ROWS, row
from tests.python_path import REPOSITORY


def test_the_page_shows_what_was_found() -> None:
    assert table.shown() == table.render(table.load())


def test_the_readme_counts_the_models_that_were_restored_exactly() -> None:
    results = table.load()
    exact = [name for name, cells in results.items() if cells[Column.CPU].verdict is Verdict.EXACT]
    assert results.keys() - exact == {"Jamba", "DeepSeek V2"}
    assert f"{len(exact)} of {len(results)} tiny models were restored exactly" in (REPOSITORY / "README.md").read_text()


def test_every_model_has_every_cell_and_none_is_wrong() -> None:
    results = table.load()
    assert set(results) == {row.name for row in ROWS}
    for name, cells in results.items():
        assert set(cells) == set(Column), name
        for column, cell in cells.items():
            assert row(name).allows(cell), (name, column, cell)


@pytest.mark.parametrize("verdict", Verdict)
def test_only_what_a_row_says_may_be_missing(verdict: Verdict) -> None:
    mamba, jamba, other = row("Mamba2"), row("Jamba"), row("LFM2")
    assert jamba.excuse is not None
    is_good = verdict in (Verdict.EXACT, Verdict.AS_DEVICE)
    assert mamba.allows(Cell(verdict, mamba.misses_shared_prefix)) == (is_good or verdict is Verdict.NO_HIT)
    assert jamba.allows(Cell(verdict, jamba.excuse.reason)) == (is_good or verdict is Verdict.NOT_RUN)
    assert other.allows(Cell(verdict)) == mamba.allows(Cell(verdict)) == is_good


def test_a_cell_that_is_not_exact_says_why() -> None:
    for name, cells in table.load().items():
        for column, cell in cells.items():
            assert cell.verdict is Verdict.EXACT or len(cell.note) > 20, (name, column)


def test_equal_findings_are_said_once_and_name_their_columns() -> None:
    same = Cell(Verdict.NOT_RUN, "the same reason")
    some = dict.fromkeys(Column, Cell(Verdict.EXACT)) | dict.fromkeys((Column.CPU, Column.DISK), same)
    exact, partly, never, *_ = ROWS
    results = {row.name: dict.fromkeys(Column, Cell(Verdict.EXACT)) for row in ROWS}
    results |= {partly.name: some, never.name: dict.fromkeys(Column, same)}
    first, second = table.render(results).split("Others:")
    assert f"- **{exact.name}**: {exact.layers}\n" in first
    assert second == (
        f"\n\n- **{partly.name}**: {partly.layers}. *not run* (CPU tier, disk tier, restarted): the same reason."
        f"\n- **{never.name}**: {never.layers}. *not run*: the same reason.\n"
    )


@pytest.mark.parametrize(("options", "is_written"), [((), False), (("--write",), True)])
def test_a_run_writes_its_list_when_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], is_written: bool
) -> None:
    """Beside it another suite compares that list with the README."""
    found = dict.fromkeys(Column, Cell(Verdict.AS_DEVICE, "as vLLM's own cache answers"))
    monkeypatch.setattr(matrix, "RowRun", lambda *_: SimpleNamespace(run=lambda: found))
    files = [Path(shutil.copy(file, tmp_path)) for file in (table.RESULTS, table.PAGE)]
    monkeypatch.setattr(table, "RESULTS", files[0])
    monkeypatch.setattr(table, "PAGE", files[1])
    before = [file.read_bytes() for file in files]
    monkeypatch.setattr(sys, "argv", ["matrix", "LFM2", *options])
    assert matrix.main() == 0
    assert [file.read_bytes() != old for file, old in zip(files, before, strict=True)] == [is_written] * 2
    assert (table.load()["LFM2"] == found) == is_written
    assert table.shown() == table.render(table.load())
