# SPDX-License-Identifier: Apache-2.0
"""The alert rules under promtool: each fires where it should, and is silent where it should be."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards.boards import DIRECTORY
from tests.dashboards.prometheus import NotToBeHadError, program
from tests.dashboards.test_dashboards import EVERYWHERE, known_series, labels_in

RULES, CASES = "alerts.yml", "alerts_test.yml"
NEVER, ALWAYS = "vector(0) > 1", "vllm:kv_connector_asked_tokens_total or vector(1)"


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((DIRECTORY / RULES).read_text())["groups"][0]["rules"]
    return found


def alerts() -> list[str]:
    return [rule["alert"] for rule in rules() if "alert" in rule]


@pytest.fixture(scope="module")
def promtool() -> Path:
    try:
        return program("promtool")
    except NotToBeHadError as error:
        pytest.skip(f"no promtool: {error}")


def run(promtool: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(promtool), *arguments], cwd=directory, capture_output=True, text=True)


@pytest.mark.dashboards
def test_prometheus_accepts_rules_and_configuration(promtool: Path) -> None:
    for arguments in (("check", "rules", RULES), ("check", "config", "prometheus.yml")):
        done = run(promtool, DIRECTORY, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.dashboards
def test_alerts_fire_and_are_silent(promtool: Path) -> None:
    done = run(promtool, DIRECTORY, "test", "rules", CASES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.dashboards
@pytest.mark.parametrize("name", alerts())
def test_the_cases_hold_each_alert_from_both_sides(promtool: Path, tmp_path: Path, name: str) -> None:
    """An alert that never fires fails them, and so does one that always fires."""
    shutil.copy(DIRECTORY / CASES, tmp_path)
    for broken in (NEVER, ALWAYS):
        changed = [rule | {"expr": broken} if rule.get("alert") == name else rule for rule in rules()]
        (tmp_path / RULES).write_text(yaml.safe_dump({"groups": [{"name": "vllm-overlay", "rules": changed}]}))
        done = run(promtool, tmp_path, "test", "rules", CASES)
        assert done.returncode == 1
        assert f"alertname: {name}" in done.stdout + done.stderr


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_are_of_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    known = known_series() | {one["record"]: EVERYWHERE for one in rules() if "record" in one}
    used = set(re.findall(r"vllm:[\w:]+", rule["expr"]))
    assert used and used <= set(known)
    assert labels_in(rule["expr"]) <= {label for name in used for label in known[name]}
    if "alert" in rule:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}
        said = {label for text in rule["annotations"].values() for label in re.findall(r"\$labels\.(\w+)", text)}
        assert said <= (labels_in(rule["expr"]) or EVERYWHERE)
