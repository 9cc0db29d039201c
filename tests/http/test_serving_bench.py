# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark with two real servers: a short run ends with its table, and Ctrl-C leaves nothing."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.serving import main
from tests.python_path import REPOSITORY
from tests.waiting import until
from tools.process_group import members

pytestmark = [pytest.mark.engine, pytest.mark.benchmarks]

CHAT = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
"""Blocks of a chat's last turn; 11 of them are 1,408 tokens for the tiny model, more than two of its blocks."""
OURS = "ours, lru, loads always"
DEVICE_BLOCKS = 36
"""Hardly more than the longest prompt that the servers take. One of OTHERS takes 18: 12 of attention and 2 in each of
three groups of states."""
OTHERS = 56
"""Blocks of each prompt between the turns."""
TWO_SIDES = ("--policies", "lru", "--loading", "always", "--others", "--requests", "6")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A chat of two turns. Of the four prompts between them any two take all of the device cache."""
    lines = []
    for at in range(6):
        blocks = CHAT[: 6 + at] if at in (0, 5) else [100 * at + place for place in range(OTHERS)]
        length = 512 * len(blocks) + 100
        lines.append({"timestamp": 1000 * at, "input_length": length, "output_length": 20, "hash_ids": blocks})
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_short_run_serves_every_request_on_both_sides(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    # Of three parts the second one separates the turns, in whatever order the requests of a part are served.
    sizes = ("--rounds", "3", "--device-blocks", str(DEVICE_BLOCKS), "--cpu-share", "1", "--disk-share", "0.5")
    assert (
        main([str(trace), *TWO_SIDES, *sizes, "--load", "5", "--directory", str(tmp_path), "--json", str(found)]) == 0
    )
    written = json.loads(found.read_text())
    sides = {side["side"]["name"]: side for side in written["sides"]}
    printed = capsys.readouterr().out
    assert list(sides) == ["no connector", OURS]
    assert all(f"| {name}" in printed for name in sides), printed
    assert all(sum(len(part["served"]) for part in side["parts"]) == 6 for side in sides.values())
    assert all(side["cpu_s"] > 0 for side in sides.values())
    assert sides["no connector"]["restored_tokens"] == 0
    assert 0 < sides[OURS]["restored_tokens"] <= written["reuse"]["shared"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []  # no model, root or log is left


@pytest.fixture
def running(trace: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The program, as a user starts it. At such a load the arrivals would take minutes."""
    command = [sys.executable, "-m", "bench.serving", str(trace), *TWO_SIDES, "--directory", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--load", "0.001"], stderr=subprocess.PIPE, cwd=REPOSITORY, start_new_session=True
    )
    yield process
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.communicate()


def is_alive(process: psutil.Process) -> bool:
    """Who is dead and not waited for is not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_ctrl_c_between_arrivals_ends_all_servers_and_leaves_nothing(
    running: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    sent = 'POST /v1/completions HTTP/1.1" 200'
    seen: set[psutil.Process] = set()

    def num_sent() -> list[int]:
        """The requests that each server that has begun has answered."""
        assert running.poll() is None, running.communicate()[1].decode()
        seen.update(psutil.Process(running.pid).children(recursive=True))
        return [path.read_text(errors="replace").count(sent) for path in tmp_path.rglob("server.log")]

    until(lambda: sum(num_sent()) >= 1 + 6, "the warm-up of the first server, and what measures the rate")
    until(lambda: len(num_sent()) == 2 and all(num_sent()), "the warm-up of the second server")
    until(lambda: sum(num_sent()) > 2 + 6, "the first arrival")
    running.send_signal(signal.SIGINT)
    printed = running.communicate()[1].decode()
    assert running.returncode == 130, printed
    assert "interrupted: nothing is left running" in printed and "Traceback" not in printed
    assert [process for process in seen if is_alive(process) or members(process.pid)] == []
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
