# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay verify`` on real servers: it passes, and it fails when snapshots are wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import cpu_child, disk_child, multi
from tests.engine.states import FLOAT32
from tests.http.plugin import plugin
from tests.http.warm_server import WarmServer
from tools.tiny_model import make_tiny_model
from vllm_overlay import cli

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("rank_in_the_core")]

LONGEST = "1200"
"""Tokens: up to a block and a few tokens."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
ZEROED_SNAPSHOTS = """
from vllm_overlay.planner.objects import SNAPSHOT_TAG
from vllm_overlay.tiers.cpu import CpuTierWorker

submit_stores = CpuTierWorker.submit_stores


def zeroed(self, left):
    for ticket, buffer in left:
        if ticket.planned.object_id.tag == SNAPSHOT_TAG:
            self._pool.array[list(buffer.units)] = 0
    submit_stores(self, left)


def register():
    CpuTierWorker.submit_stores = zeroed
"""


def verify(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """The results of a run that passed, and all answers of which are equal."""
    capsys.readouterr()
    assert cli.main(["verify", *arguments, "--json"]) == 0
    results: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert {result["verdict"] for result in results} == {"equal"}
    return results


def sources(results: list[dict[str, Any]]) -> set[str]:
    return {name for result in results for name in result["loaded_bytes"]}


@pytest.mark.parametrize(
    ("speculation", "restored"),
    [
        (None, [64, 128, 1088, 1152]),
        pytest.param({"method": "mtp", "num_speculative_tokens": 2}, [64, 128, 1088], marks=pytest.mark.engines),
        pytest.param(NGRAM, [64, 128, 1088, 1152], marks=pytest.mark.engines),
    ],
    ids=["no drafts", "mtp", "ngram"],
)
def test_what_both_tiers_restore_is_equal_also_after_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], speculation: dict[str, Any] | None, restored: list[int]
) -> None:
    config = multi(cpu_child(load_weight=1.0), disk_child(tmp_path / "root", load_weight=1.0))
    file = str(tmp_path / "answers.json")
    model = make_tiny_model(tmp_path / "model", has_draft_head=True)
    flags = [*FLOAT32.flags, *(["--speculative-config", json.dumps(speculation)] if speculation else [])]

    def server(name: str) -> WarmServer:
        return WarmServer(model, config, log_path=tmp_path / name, arguments=flags)

    # The last prompt extends the one before it; what it added is on the disk when the server is restarted.
    first = server("first")
    with first:
        results = verify(capsys, first.url, "--longest", LONGEST, "--save", file)
        assert [result["restored_tokens"] for result in results] == [*restored, restored[-1]]
        assert sources(results) == {"cpu"}
        assert cli.main(["verify", first.url, "--against", file]) == 2
        assert "has not been restarted since the file was written: restart it first" in capsys.readouterr().err
    second = server("second")
    with second:
        results = verify(capsys, second.url, "--against", file)
    assert [result["restored_tokens"] for result in results] == [*restored, 1216]
    assert "disk" in sources(results)


@pytest.mark.faults
def test_zeroed_snapshots_fail_and_the_prompt_and_the_first_token_are_named(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = plugin(tmp_path / "plugin", "zeroed_snapshots", ZEROED_SNAPSHOTS)
    arguments = FLOAT32.flags
    server = WarmServer(
        tiny_model, multi(cpu_child()), log_path=tmp_path / "log", arguments=arguments, environment=environment
    )
    with server:
        assert cli.main(["verify", server.url, "--longest", "200"]) == 1
    said = capsys.readouterr().out
    assert "69 tokens " in said and "DIFFERENT" in said and ": token " in said
    assert "FAILED: 3 answers: 3 DIFFERENT (tolerance 0.05)" in said
    assert "not looked at: what a restart finds" in said


@pytest.mark.engines
def test_a_running_server_without_our_connector_is_told_what_to_change(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = WarmServer(tiny_model, None, log_path=tmp_path / "log", arguments=FLOAT32.flags)
    with server:
        assert cli.main(["verify", server.url]) == 2
    assert "has no HybridOffloadConnector: start it with a --kv-transfer-config" in capsys.readouterr().err
