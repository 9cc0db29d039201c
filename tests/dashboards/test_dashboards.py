# SPDX-License-Identifier: Apache-2.0
"""The dashboards: valid for Grafana's SDK, of metrics and labels that exist."""

import re

import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard

from devtools.metrics_page import METRICS
from tests.dashboards.boards import NAMES, Target, panels, read, targets

OF_VLLM = {"vllm:prompt_tokens_by_source": ("counter", {"source"}), "vllm:num_requests_running": ("gauge", set[str]())}
"""vLLM's own metrics that panels use, with their labels; a real server has them (test_panels.py)."""
EVERYWHERE = {"model_name", "engine", "instance", "job"}
"""Labels of every series: vLLM's, and those that Prometheus adds."""
SUFFIXES = {"counter": {"_total": ()}, "gauge": {"": ()}, "histogram": {"_bucket": ("le",), "_sum": (), "_count": ()}}
"""Of the names of series as Prometheus has them, with the labels that it adds."""
GRID_WIDTH = 24


def known_series() -> dict[str, set[str]]:
    """Each series as Prometheus has it -> its labels."""
    metrics = {metric.name: (metric.kind.value, set(metric.labels)) for metric in METRICS} | OF_VLLM
    return {
        name + suffix: EVERYWHERE | labels | set(added)
        for name, (kind, labels) in metrics.items()
        for suffix, added in SUFFIXES[kind].items()
    }


def series_in(expression: str) -> set[str]:
    return set(re.findall(r"vllm:\w+", expression))


def labels_in(expression: str) -> set[str]:
    """By which it sums or chooses."""
    sums = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
    chooses = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
    return sums | chooses


def unknown_labels(expression: str) -> set[str]:
    """Labels that none of its series has."""
    known = known_series()
    return labels_in(expression) - {label for name in series_in(expression) for label in known.get(name, ())}


@pytest.mark.parametrize("name", NAMES)
def test_grafanas_sdk_reads_it(name: str) -> None:
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
def test_queries_are_of_metrics_and_labels_that_exist(target: Target) -> None:
    series = series_in(target.expression)
    assert series
    assert series <= set(known_series())
    assert unknown_labels(target.expression) == set()


def test_a_label_that_no_metric_of_a_query_has_is_found() -> None:
    by = 'sum by (connector, {}) (rate(vllm:hybrid_offload_lost_tokens_total{{model_name=~"$model", {}=~".*"}}[1m]))'
    assert unknown_labels(by.format("reason", "engine")) == set()
    assert unknown_labels(by.format("reasons", "engine")) == {"reasons"}
    assert unknown_labels(by.format("reason", "le")) == {"le"}


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
