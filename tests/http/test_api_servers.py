# SPDX-License-Identifier: Apache-2.0
"""Two API servers before one engine, as vLLM has several by default with data parallelism: what they show."""

import itertools
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import multiprocess

from tests.engine.client import cpu_child, disk_child, multi, prompt
from tests.engine.states import FLOAT32
from tests.http.plugin import plugin
from tests.python_path import run_python
from tests.waiting import until
from tools.server import Server
from vllm_overlay.metrics import HYBRID_OFFLOAD, MULTI_CONNECTOR, Kind
from vllm_overlay.server.api_client import ApiClient, Metrics

pytestmark = [pytest.mark.engine, pytest.mark.faults]

STATE = "vllm:kv_connector_state"
GAUGES = [one.name for family in (HYBRID_OFFLOAD, MULTI_CONNECTOR) for one in family.values() if one.kind is Kind.GAUGE]
ALL_SERVE, DISK_IS_OUT = {"cpu": [0.0], "disk": [0.0]}, {"cpu": [0.0], "disk": [2.0]}
QUERIES = "vllm:kv_connector_queries_total"
SCRAPES, AT_ONCE = 24, 8
"""Each is a connection of its own, which one of two API servers takes: the other takes some while that one works."""

_PLUGIN = """
import os

from vllm_overlay.connector.connector import HybridOffloadConnector

start, lookup = HybridOffloadConnector.__init__, HybridOffloadConnector.get_num_new_matched_tokens


def fail(config):
    if os.path.exists({fault!r}) and config.kv_connector_extra_config["name"] == "disk":
        raise RuntimeError("a fault of the test")


def failing_start(self, vllm_config, *arguments):
    fail(vllm_config.kv_transfer_config)
    start(self, vllm_config, *arguments)


def failing_lookup(self, *arguments):
    fail(self._kv_transfer_config)
    return lookup(self, *arguments)


def register():
    HybridOffloadConnector.__init__ = failing_start
    HybridOffloadConnector.get_num_new_matched_tokens = failing_lookup
"""


@pytest.fixture
def fault(tmp_path: Path) -> Path:
    """While this file is there, each lookup in the disk tier raises, and no other instance of it can be built."""
    return tmp_path / "fault"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Where the API servers keep what they were told."""
    directory = tmp_path / "shared-metrics"
    directory.mkdir()
    return directory


class ApiServers(Server):
    """``vllm serve``, which starts several."""

    PROGRAM = ("tests.http.vllm_serve", "serve")


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path, fault: Path, shared: Path, rank_in_the_core: None) -> Server:
    return ApiServers(
        tiny_model,
        multi(cpu_child(), disk_child(tmp_path / "root"), retry_first_s=0.1, retry_longest_s=0.1),
        log_path=tmp_path / "server.log",
        arguments=[*FLOAT32.flags, "--api-server-count", "2"],
        environment={
            **plugin(tmp_path / "plugin", "failing_disk", _PLUGIN.format(fault=str(fault))),
            "PROMETHEUS_MULTIPROC_DIR": str(shared),
        },
    )


def states(metrics: Metrics) -> dict[str, list[float]]:
    """Of each child, all that is shown of its state."""
    found: dict[str, list[float]] = {}
    for sample in metrics.samples(STATE):
        found.setdefault(sample.labels["connector"], []).append(sample.value)
    return found


def scrapes(api: ApiClient) -> list[Metrics]:
    """What the API servers show. None shows a level of ours twice."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda _: api.metrics(), range(SCRAPES)))
    for metrics in found:
        for name in GAUGES:
            shown = Counter(sample.labels["connector"] for sample in metrics.samples(name))
            assert set(shown.values()) <= {1}, metrics.samples(name)
    return found


def probe(server: Server) -> tuple[int, dict[str, str]]:
    """Its exit status, and the state of each child in its words."""
    done = run_python("-m", "vllm_overlay", "probe", server.url, "--json")
    return done.returncode, {row["connector"]: row["state"] for row in json.loads(done.stdout)["connectors"]}


def test_every_api_server_shows_a_child_go_out_of_service_and_come_back(
    server: Server, fault: Path, shared: Path
) -> None:
    seeds = itertools.count()
    with server as api:

        def after_requests() -> dict[str, list[float]]:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(lambda _: api.complete(prompt(200, seed=next(seeds)), max_tokens=2), range(AT_ONCE)))
            return states(api.settled_metrics())

        assert all(states(metrics) == ALL_SERVE for metrics in scrapes(api))
        fault.touch()
        until(lambda: after_requests() == DISK_IS_OUT, "the disk tier out of service")
        assert all(states(metrics) == DISK_IS_OUT for metrics in scrapes(api))
        assert probe(server) == (1, {"cpu": "serving", "disk": "out of service"})
        fault.unlink()
        until(lambda: after_requests() == ALL_SERVE, "its return")
        until(lambda: after_requests() and len(told(shared)) == 2, "a report to each API server")
        for metrics in scrapes(api):
            assert states(metrics) == ALL_SERVE
            isolations, returns = (
                metrics.value(f"vllm:kv_connector_{name}_total", connector="disk") for name in ("isolations", "returns")
            )
            assert isolations == returns >= 1
        assert api.settled_metrics().value(QUERIES, connector="cpu") == next(seeds)
        assert probe(server) == (0, {"cpu": "serving", "disk": "serving"})


def told(shared: Path) -> list[Path]:
    """What the API servers keep that were told of a lookup."""
    return [
        file
        for file in shared.glob("counter_*.db")
        for metric in multiprocess.MultiProcessCollector.merge([str(file)])
        for sample in metric.samples
        if (sample.name, sample.labels.get("connector")) == (QUERIES, "cpu") and sample.value
    ]
