# SPDX-License-Identifier: Apache-2.0
"""Models that no other test runs, on one rank: the short form of what the suite's command runs."""

from pathlib import Path

import pytest

from tests.matrix.cells import Column
from tests.matrix.rows import row
from tests.matrix.run import RowRun

pytestmark = [pytest.mark.engine, pytest.mark.models]


@pytest.mark.parametrize("name", ["Qwen3-Next", "LFM2", "gpt-oss"])
def test_a_model_restores_what_it_computed_and_wrong_bytes_are_seen(name: str, tmp_path: Path) -> None:
    cells = RowRun(row(name), tmp_path).run(with_two_ranks=False)
    assert set(cells) == set(Column) - {Column.TWO_RANKS}
    assert {column: cell for column, cell in cells.items() if not cell.is_good} == {}
