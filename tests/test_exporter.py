# SPDX-License-Identifier: Apache-2.0
"""Several API servers of one engine: each of its reports goes to one of them, and each of them shows all."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.python_path import python_path, run_python
from vllm_overlay.server.api_client import Metrics
from vllm_overlay.tally import Tally

STATE = "vllm:kv_connector_state"
OUT, COMING_BACK, SERVING = 2.0, 3.0, 0.0

API_SERVERS = """
import json, os, sys
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from vllm_overlay.exporter import Exporter
from vllm_overlay.metrics import MULTI_CONNECTOR
from vllm_overlay.tally import Tally

for reports in json.load(sys.stdin):
    if (pid := os.fork()) == 0:
        types = {kind: kind for kind in (Counter, Gauge, Histogram)}
        exporter = Exporter(MULTI_CONNECTOR, types, ["model_name", "engine"], {0: ["m", "0"]}, ["disk"])
        for report in reports:
            exporter.observe(0, "disk", Tally.from_dict(report))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
sys.stdout.write(generate_latest(registry).decode())
"""
"""A process of its own: Prometheus' client asks when it is imported whether others share its metrics."""


def shown(directory: Path, *told: list[dict[str, Any]]) -> Metrics:
    """What any API server shows. ``told``: of each, the reports that it gets, one API server after the other."""
    environment = {**os.environ, "PYTHONPATH": python_path(), "PROMETHEUS_MULTIPROC_DIR": str(directory)}
    done = run_python("-c", API_SERVERS, env=environment, input=json.dumps(told))
    assert done.returncode == 0, done.stderr
    return Metrics(done.stdout)


def states(metrics: Metrics) -> list[tuple[dict[str, str], float]]:
    return [(sample.labels, sample.value) for sample in metrics.samples(STATE)]


def test_levels_are_there_before_any_report(tmp_path: Path) -> None:
    labels = {"model_name": "m", "engine": "0", "connector": "disk"}
    assert states(shown(tmp_path, [], [])) == [(labels, SERVING)]


def test_the_newest_level_is_shown_whichever_server_hears_of_it_last(tmp_path: Path) -> None:
    out, coming_back, serving = (Tally(gauges={"state": state}).to_dict() for state in (OUT, COMING_BACK, SERVING))
    ((_, value),) = states(shown(tmp_path, [out, serving], [coming_back]))
    assert value == SERVING


def test_a_server_that_starts_later_hides_no_level(tmp_path: Path) -> None:
    ((_, value),) = states(shown(tmp_path, [Tally(gauges={"state": OUT}).to_dict()], []))
    assert value == OUT


def test_the_first_report_outdates_what_servers_before_have_left(tmp_path: Path) -> None:
    """Where PROMETHEUS_MULTIPROC_DIR is an operator's own, it may outlive a server."""
    assert states(shown(tmp_path, [Tally(gauges={"state": OUT}).to_dict()]))[0][1] == OUT
    ((_, value),) = states(shown(tmp_path, [Tally(gauges={"state": SERVING}).to_dict()]))
    assert value == SERVING


def test_what_each_server_was_told_adds_up(tmp_path: Path) -> None:
    tally = Tally({"chosen": 2})
    tally.observe("load_seconds", 0.5)
    metrics = shown(tmp_path, [tally.to_dict()], [tally.to_dict(), tally.to_dict()])
    assert metrics.value("vllm:kv_connector_chosen_total") == 6
    assert metrics.value("vllm:kv_connector_load_seconds_count") == 3
    assert metrics.value("vllm:kv_connector_load_seconds_sum") == pytest.approx(1.5)
