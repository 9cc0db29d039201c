# SPDX-License-Identifier: Apache-2.0
"""A chart's configuration on a volume that is smaller than its defaults, such as a container's /dev/shm of 64 MB."""

from pathlib import Path

import msgspec
import pytest

from tests.engine.client import prompt
from tests.http.warm_server import WarmServer
from tests.tiers.disk.file_systems import disk
from tests.waiting import until
from vllm_overlay import cli

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("rank_in_the_core")]

CHART = """
{"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both",
 "kv_connector_extra_config": {"tier": "disk", "root": "$ROOT", "capacity_bytes": "200Gi"}}
"""


def test_the_log_names_what_works_and_probe_says_that_nothing_can_be_stored(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "server.log"

    with disk(tmp_path / "shm", num_bytes=64 << 20) as shm:
        root = shm.path / "kv"
        server = WarmServer(tiny_model, msgspec.json.decode(CHART.replace("$ROOT", str(root))), log_path=log)
        with server as api:
            until(lambda: f"nothing can be stored under {root}: its file system has 64MiB" in log.read_text(), "a word")
            api.complete(prompt(700, seed=1))
            api.settled_metrics()
            status = cli.main(["probe", server.url, "--json"])
            found = msgspec.json.decode(capsys.readouterr().out)
        assert (status, found["is_sound"], found["tiers"][0]["capacity"]) == (1, False, "0 B")
        assert "tier disk can store nothing where it is" in found["cause"]
    assert "Set min_free_bytes to 8MiB and capacity_bytes to at most 56MiB" in log.read_text()
