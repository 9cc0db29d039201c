# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in any phase of the demo leaves nothing; SIGTERM to the server lets pending stores finish."""

import signal
from pathlib import Path

import pytest

from tests.engine.client import disk_child, multi, prompt
from tests.http.demo_process import DemoProcess
from tests.http.waiting_disk import waiting_disk
from tests.http.warm_server import WarmServer
from tests.tiers.disk.files import object_files
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("phase", "num_processes", "number"),
    [
        ("start the first server", 1, signal.SIGINT),
        pytest.param("start the first server", 1, signal.SIGHUP, marks=pytest.mark.faults),
        pytest.param("start the first server", 4, signal.SIGTERM, marks=pytest.mark.faults),
        pytest.param("warm it up", 4, signal.SIGINT, marks=pytest.mark.faults),
    ],
)
def test_an_interrupted_demo_leaves_nothing(
    demo_directory: Path, phase: str, num_processes: int, number: signal.Signals
) -> None:
    with DemoProcess(demo_directory) as process:
        process.wait_for(phase)
        process.wait_for_processes(num_processes)
        process.send(number)
        assert process.finish() == 130, process.output
        assert "interrupted: nothing is left running" in process.output
        assert "Traceback" not in process.output
        process.assert_nothing_left()


@pytest.mark.faults
def test_ctrl_c_twice_while_the_server_stops_leaves_nothing(demo_directory: Path) -> None:
    with DemoProcess(demo_directory) as process:
        process.wait_for("stop the first server")
        process.send(signal.SIGINT)
        process.send(signal.SIGINT)
        assert process.finish() == 130, process.output
        process.assert_nothing_left()


def test_sigterm_gives_pending_stores_the_time_they_need(tiny_model: Path, tmp_path: Path) -> None:
    """The disk waits until SIGTERM was sent, so that all of them are pending then."""
    tokens = prompt(2000, seed=1)
    root = tmp_path / "root"
    config = multi(disk_child(root, shutdown_timeout_s=PATIENCE_S))
    gate = tmp_path / "gate"

    waiting = waiting_disk(tmp_path / "plugin", gate)
    patient = ["--shutdown-timeout", f"{PATIENCE_S:.0f}"]
    first = WarmServer(tiny_model, config, log_path=tmp_path / "first.log", arguments=patient, environment=waiting)
    with first as api:
        cold = api.complete(tokens)
        assert not any(path.stat().st_size for path in object_files(root))
        assert first.group is not None
        first.group.terminate()
        gate.touch()
        assert first.group.wait(PATIENCE_S)
    assert len(object_files(root)) > 1984 // 64

    with WarmServer(tiny_model, config, log_path=tmp_path / "second.log") as api:
        restored = api.complete(tokens)
    assert restored.num_cached_tokens == 1984
    assert restored.same_as(cold)
