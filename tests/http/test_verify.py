# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay verify`` on real servers: it passes, and it fails when snapshots are wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import cpu_child, disk_child, multi
from tests.engine.states import FLOAT32
from tests.http.plugin import plugin
from tools.server import KV_CACHE_BYTES, Server
from vllm_overlay import cli

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("rank_in_the_core")]

LONGEST = "1200"
"""Tokens: up to a block and a few tokens."""
ZEROED_SNAPSHOTS = """
from vllm_overlay.planner.objects import SNAPSHOT_TAG
from vllm_overlay.tiers.cpu import CpuTierWorker

submit_store = CpuTierWorker.submit_store


def zeroed(self, ticket, buffer):
    if ticket.planned.object_id.tag == SNAPSHOT_TAG:
        self._pool.array[list(buffer.units)] = 0
    submit_store(self, ticket, buffer)


def register():
    CpuTierWorker.submit_store = zeroed
"""


def server_arguments(model: Path, config: dict[str, Any]) -> list[str]:
    flags = ["--model", str(model), "--prefix-match-unit", "64", "--enforce-eager", "--shutdown-timeout", "10"]
    return [
        *flags,
        *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
        *FLOAT32.flags,
        "--kv-transfer-config",
        json.dumps(config),
    ]


@pytest.mark.parametrize("restarts", [False, pytest.param(True, marks=pytest.mark.engines)])
def test_what_both_tiers_restore_is_equal_also_after_a_restart(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], restarts: bool
) -> None:
    # As the README has it; a measured weight might find computing faster, and verify leaves it no choice.
    config = multi(cpu_child(load_weight="auto"), disk_child(tmp_path / "root", load_weight="auto"))
    options = ["--json", "--longest", LONGEST, "--log", str(tmp_path / "log")]
    options += [] if restarts else ["--no-restart"]
    assert cli.main(["verify", *options, "--", *server_arguments(tiny_model, config)]) == 0
    results = json.loads(capsys.readouterr().out)
    assert {result["verdict"] for result in results} == {"equal"}
    # The last prompt extends the one before it; what it added is on the disk when the server is restarted.
    restored = [64, 128, 1088, 1152]
    again = [*restored, 1216] if restarts else []
    assert [result["restored_tokens"] for result in results] == [*restored, 1152, *again]
    sources = {
        life: {name for result in results if result["restored_after"] == life for name in result["loaded_bytes"]}
        for life in ("device cache emptied", "server restarted")
    }
    assert sources["device cache emptied"] == {"cpu"}
    assert ("disk" in sources["server restarted"]) == restarts


@pytest.mark.faults
def test_zeroed_snapshots_fail_and_the_prompt_and_the_first_token_are_named(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in plugin(tmp_path / "plugin", "zeroed_snapshots", ZEROED_SNAPSHOTS).items():
        monkeypatch.setenv(name, value)
    arguments = server_arguments(tiny_model, multi(cpu_child()))
    options = ["--longest", "200", "--no-restart", "--log", str(tmp_path / "log")]
    assert cli.main(["verify", *options, "--", *arguments]) == 1
    said = capsys.readouterr().out
    assert "69 tokens " in said and "DIFFERENT" in said and ": token " in said
    assert "FAILED: 3 restored answers: 3 DIFFERENT (tolerance 0.05)" in said
    assert "not looked at: what a restart finds" in said


@pytest.mark.engines
def test_a_running_server_without_our_connector_is_told_what_to_change(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(tiny_model, None, log_path=tmp_path / "log", arguments=FLOAT32.flags)
    with server:
        url = server.url
        assert cli.main(["verify", url]) == 2
    assert "has no HybridOffloadConnector: start it with a --kv-transfer-config" in capsys.readouterr().err
    assert cli.main(["verify", url]) == 2
    assert f"no server answers at {url}: start it, or give its arguments after --" in capsys.readouterr().err
    assert cli.main(["verify", "ftp://there"]) == 2
    assert "is no URL of a server: give one such as http://127.0.0.1:8000" in capsys.readouterr().err
