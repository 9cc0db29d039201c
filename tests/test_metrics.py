# SPDX-License-Identifier: Apache-2.0
"""The metric label ``reason``: docs/metrics.md lists what the code can say, and the code says it with the enum."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from devtools import metrics_page
from devtools.docs.generated import parts_of
from devtools.metrics_page import METRICS, lists, meanings_of
from vllm_overlay import metrics
from vllm_overlay.common import reasons
from vllm_overlay.common.reasons import (
    DROPPED_STORES,
    FAILED_LOADS,
    GROUP_KINDS,
    IGNORED_OFFERS,
    LOOKUP_LIMITS,
    LOST_TOKENS,
    Reason,
)
from vllm_overlay.metrics import HYBRID_OFFLOAD, MULTI_CONNECTOR, Source

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "vllm_overlay"
SETS = {
    "vllm:hybrid_offload_lookup_limits": LOOKUP_LIMITS,
    "vllm:hybrid_offload_lost_tokens": LOST_TOKENS,
    "vllm:hybrid_offload_dropped_stores": DROPPED_STORES,
    "vllm:hybrid_offload_failed_loads": FAILED_LOADS,
    "vllm:kv_connector_ignored_offers": IGNORED_OFFERS,
    "vllm:kv_connector_ignored_offer_tokens": IGNORED_OFFERS,
}
"""A counter -> the reasons it is labelled with."""
OF_HOOKS = "vllm:hybrid_offload_hook_errors"


# The page.


def test_the_page_says_what_the_code_says() -> None:
    """If not, ``python -m devtools.metrics_page`` writes it."""
    assert parts_of(metrics_page.PAGE.read_text()) == lists()


def test_every_reason_and_source_says_what_it_means() -> None:
    assert set(meanings_of(Path(reasons.__file__), Reason)) == set(Reason)
    assert set(meanings_of(Path(metrics.__file__), Source)) == set(Source)


def test_every_counter_with_this_label_has_its_set_but_the_one_of_hooks() -> None:
    assert {metric.name for metric in METRICS if metrics.REASON in metric.labels} == {*SETS, OF_HOOKS}


@pytest.mark.parametrize("name", SETS)
def test_a_counters_series_begin_with_all_that_it_can_say(name: str) -> None:
    (metric,) = (metric for metric in METRICS if metric.name == name)
    assert set(metric.zeros) == SETS[name]


def test_every_reason_is_said_by_some_counter() -> None:
    assert set(Reason) == LOST_TOKENS | DROPPED_STORES | FAILED_LOADS | IGNORED_OFFERS


def test_what_loses_tokens_is_what_limits_lookups_or_comes_after_them() -> None:
    assert LOOKUP_LIMITS < LOST_TOKENS
    assert set(GROUP_KINDS) < LOST_TOKENS


# The rows.


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_says_what_it_is(metric: metrics.Metric) -> None:
    assert metric.labels[0] == metrics.CONNECTOR
    assert metric.documentation.endswith(".")
    assert not metric.name.endswith("_total")
    assert bool(metric.buckets) == (metric.kind is metrics.Kind.HISTOGRAM)


def test_what_both_families_measure_has_the_same_buckets() -> None:
    """A tally knows a histogram by its name below the family's prefix."""
    for family in (HYBRID_OFFLOAD, MULTI_CONNECTOR):
        for field, metric in family.items():
            assert metric.buckets == metrics.BUCKETS.get(field, ())


@pytest.mark.parametrize(("room", "family"), [("connector", HYBRID_OFFLOAD), ("multi_connector", MULTI_CONNECTOR)])
def test_a_room_counts_all_that_has_a_row_and_nothing_else(room: str, family: Mapping[str, metrics.Metric]) -> None:
    nodes = [node for path in (PACKAGE / room).rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    written = {node.value for node in nodes if isinstance(node, ast.Constant)}
    written |= {level.arg for call in calls if called(call) in ("Gauges", "record") for level in call.keywords}
    assert set(family) - written == set()
    counted = {
        node.args[0].value
        for node in calls
        if called(node) in ("count", "observe", "gauge", "total")
        if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    }
    assert len(counted) > 15
    assert counted - set(family) == set()


# The code.


NAMES = ("reason", "label")
"""What a reason is called; a tally takes it as a label."""


def parameters_called_reason(trees: list[ast.Module]) -> dict[str, set[int]]:
    """Name of a function or class -> where a reason stands among the arguments of its calls."""
    places: defaultdict[str, set[int]] = defaultdict(set)
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    name = node.name if method.name == "__init__" else method.name
                    names = [argument.arg for argument in method.args.args]
                    names = names[1:] if names[:1] == ["self"] else names
                    places[name] |= {place for place, argument in enumerate(names) if argument in NAMES}
            fields = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
            places[node.name] |= {
                place for place, field in enumerate(fields) if isinstance(field, ast.Name) and field.id in NAMES
            }
        elif isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args]
            if "self" not in names:
                places[node.name] |= {place for place, argument in enumerate(names) if argument in NAMES}
    return places


def texts(node: ast.expr) -> bool:
    """Whether a value may be a string that is written there: also one side of ``or`` and of ``if``."""
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


def called(node: ast.Call) -> str:
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def is_reason(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id in NAMES) or (
        isinstance(node, ast.Attribute) and node.attr == "reason"
    )


def bare_reasons(tree: ast.Module, places: dict[str, set[int]]) -> Iterator[int]:
    """Lines on which a string stands for a reason: as an argument, as what is assigned, in a comparison."""
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        if isinstance(node, ast.Call):
            found = [keyword.value for keyword in node.keywords if keyword.arg in NAMES]
            found += [value for place, value in enumerate(node.args) if place in places.get(called(node), ())]
        elif isinstance(node, ast.Assign) and any(is_reason(target) for target in node.targets):
            found = [node.value]
        elif isinstance(node, ast.Compare) and any(is_reason(side) for side in (node.left, *node.comparators)):
            found = [node.left, *node.comparators]
        yield from (value.lineno for value in found if texts(value))


def bare_reasons_under(package: Path) -> list[str]:
    """File and line of each, in the rooms that give reasons."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    places = parameters_called_reason(list(trees.values()))
    return [
        f"{path.relative_to(package)}:{line}"
        for path, tree in trees.items()
        if path.relative_to(package).parts[0] in ("connector", "tiers")
        for line in bare_reasons(tree, places)
    ]


def test_no_reason_in_the_code_is_a_bare_string() -> None:
    assert bare_reasons_under(PACKAGE) == []


@pytest.mark.parametrize(
    "line",
    [
        'count("dropped_stores", 1, "no_room")',
        'count("dropped_stores", label="no_room")',
        'count("dropped_stores", label=known or "unknown")',
        'self.fail("r1", "timeout" if late else Reason.ERROR)',
        'raise Bad("checksum")',
        'Result(7, f"{cause}")',
        'reason = "io_error"',
        'assert result.reason != "missing"',
    ],
)
def test_a_bare_reason_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "connector").mkdir()
    (tmp_path / "common.py").write_text(
        'def count(metric, amount=1, label=""): ...\n'
        "class Bad(Exception):\n    def __init__(self, reason): ...\n    def fail(self, request_id, reason): ...\n"
        "class Result:\n    ticket: int\n    reason: str\n"
    )
    (tmp_path / "connector" / "worker.py").write_text(f"if True:\n    {line}\n")
    assert bare_reasons_under(tmp_path) == ["connector/worker.py:2"]
