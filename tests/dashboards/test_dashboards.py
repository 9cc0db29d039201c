# SPDX-License-Identifier: Apache-2.0
"""The committed dashboards: as their code makes them, valid for the SDK, of metrics that exist."""

import re
from pathlib import Path

import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard

from devtools.dashboards import __main__ as command
from tests.dashboards.boards import DIRECTORY, NAMES, Target, panels, read, targets
from tests.metrics_page import documented_metrics

OF_VLLM = {"vllm:prompt_tokens_by_source": "counter", "vllm:num_requests_running": "gauge"}
"""vLLM's own metrics that panels use; a real server has them (test_panels.py)."""
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
GRID_WIDTH = 24


def known_series() -> set[str]:
    """Names of series as Prometheus has them."""
    ours = {row.name: row.kind for row in documented_metrics()}
    return {name + suffix for name, kind in (ours | OF_VLLM).items() for suffix in SUFFIXES[kind]}


def series_in(expression: str) -> set[str]:
    return set(re.findall(r"vllm:\w+", expression))


def test_the_files_are_what_their_code_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_file_is_named_and_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--directory", str(tmp_path)]) == 0
    (tmp_path / "overview.json").write_text("{}\n")
    assert command.main(["--check", "--directory", str(tmp_path)]) == 1
    assert "overview.json is not what its code makes: run make dashboards" in capsys.readouterr().err
    assert command.main(["--directory", str(tmp_path)]) == 0
    assert [line.rsplit(": ", 1)[1] for line in capsys.readouterr().out.splitlines()] == ["written", "unchanged"]
    assert (tmp_path / "overview.json").read_text() == (DIRECTORY / "overview.json").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_grafanas_sdk_reads_what_it_wrote(name: str) -> None:
    board = read(name)
    parsed = Dashboard.from_json(board)
    assert parsed.schema_version >= 42
    assert [panel["title"] for panel in board["panels"]] == [panel.title for panel in parsed.panels or []]
    assert len({panel["title"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("name", NAMES)
def test_panels_say_what_they_show_and_fill_the_grid(name: str) -> None:
    for panel in panels(name):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    cells = [
        (panel["gridPos"]["y"] + row, panel["gridPos"]["x"] + column)
        for panel in read(name)["panels"]
        for row in range(panel["gridPos"]["h"])
        for column in range(panel["gridPos"]["w"])
    ]
    assert len(cells) == len(set(cells))
    assert all(column < GRID_WIDTH for _, column in cells)
    assert len(cells) == GRID_WIDTH * (max(row for row, _ in cells) + 1)


@pytest.mark.parametrize("target", targets(), ids=str)
def test_queries_are_of_metrics_that_exist(target: Target) -> None:
    series = series_in(target.expression)
    assert series
    assert series <= known_series()


@pytest.mark.parametrize("target", targets(), ids=str)
def test_a_legend_names_labels_that_the_query_keeps(target: Target) -> None:
    kept = {label.strip() for by in re.findall(r"by \(([^)]*)\)", target.expression) for label in by.split(",")}
    assert set(re.findall(r"{{(\w+)}}", target.legend)) <= kept - {"le"}


@pytest.mark.parametrize("target", targets(), ids=str)
def test_every_variable_narrows_every_query(target: Target) -> None:
    for selector in re.findall(r"vllm:\w+\{([^}]*)\}", target.expression):
        assert all(f'=~"${name}"' in selector for name in ("model", "server", "engine"))
        assert ('connector=~"$connector"' in selector) is ("prompt_tokens_by_source" not in target.expression)
    assert not re.findall(r"vllm:\w+(?!\w|\{)", target.expression)


@pytest.mark.parametrize("target", [one for one in targets() if "avg(" in one.expression], ids=str)
def test_an_average_is_of_connectors_that_have_observed_something(target: Target) -> None:
    """A mean of nothing is NaN, and so is an average with it: one idle connector would blank the line of all."""
    assert re.fullmatch(r"avg\(.* >= 0\)", target.expression)
