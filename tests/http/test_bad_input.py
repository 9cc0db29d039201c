# SPDX-License-Identifier: Apache-2.0
"""A server that cannot work does not start, and says why in one sentence; one example of each place that refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import cpu_child, disk_child, multi
from tests.http.warm_server import WarmServer
from tools.server_process import ServerError

pytestmark = pytest.mark.engine


def _file(directory: Path) -> Path:
    path = directory / "file"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        pytest.param(
            lambda _: multi(cpu_child(load_weight=-1)),
            "load_weight=-1 of connector 'cpu' must be \"auto\" or a number of at least 0",
            marks=pytest.mark.faults,
        ),
        (lambda _: cpu_child(capacity_bytes="900 TiB"), "of memory that are free: set it to at most"),
        pytest.param(
            lambda path: multi(cpu_child(), disk_child(_file(path))),
            "/file' is not a directory: set it to one that",
            marks=pytest.mark.faults,
        ),
    ],
    ids=["settings", "memory", "disk"],
)
def test_a_server_that_cannot_work_says_why(
    tiny_model: Path, tmp_path: Path, config: Callable[[Path], dict[str, Any]], sentence: str
) -> None:
    log_path = tmp_path / "server.log"
    with pytest.raises(ServerError), WarmServer(tiny_model, config(tmp_path), log_path=log_path):
        pass
    assert sentence in log_path.read_text()
