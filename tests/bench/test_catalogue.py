# SPDX-License-Identifier: Apache-2.0
"""The catalogue's benchmark, with few processes and rows."""

from pathlib import Path

from bench import catalogue


def test_processes_compete_and_one_is_killed(tmp_path: Path) -> None:
    outcome = catalogue.compete(str(tmp_path), num_processes=2, rows_per_s=400.0, seconds=1.0)
    assert len(outcome.reports) == 1 and 0 < outcome.reports[0].committed <= outcome.reports[0].asked == 192
    assert 0 < outcome.most_bytes <= catalogue._CAPACITY
    assert dict(catalogue.rows_of(outcome)).keys() >= {"longest wait of any transaction", "`commit`: median, p99"}
