# SPDX-License-Identifier: Apache-2.0
"""``devtools/flakes.py`` tells which tests failed, in which runs, and where the log is; its order is the seed's."""

import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest

from devtools import flakes
from tests.python_path import REPOSITORY

RIGHT = "3 passed in 1.00s\n"
WRONG = """FAILED tests/a.py::wrong - assert 1 == 0
ERROR tests/b.py::broken
1 failed, 1 passed, 1 error in 1.00s
"""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that were run. Every second run fails, and writes what pytest would."""
    commands: list[list[str]] = []

    def run(command: list[str], *, env: dict[str, str], stdout: TextIO, **_: object) -> Any:
        commands.append([*command, env["PYTEST_ADDOPTS"]])
        fails = len(commands) % 2 == 0
        stdout.write(WRONG if fails else RIGHT)
        return subprocess.CompletedProcess(command, 2 if fails else 0)

    monkeypatch.setattr(flakes, "_LOGS", tmp_path / "logs")
    monkeypatch.setattr(flakes.subprocess, "run", run)
    return commands


def test_each_failure_is_listed_with_the_seeds_of_its_runs(
    ran: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert flakes.main(["--runs", "4", "--seed", "7", "--processor", "avx2"]) == 1
    assert [command[:4] for command in ran] == 4 * [["make", "test", "SUITE=product", "PROCESSOR=avx2"]]
    assert ["--random-order-seed=10" in command[-1] for command in ran] == [False, False, False, True]
    printed = capsys.readouterr().out
    assert "seed 8: 1 failed, 1 passed, 1 error" in printed and "product-none-avx2-8.log" in printed
    assert "seed 10: tests/a.py::wrong tests/b.py::broken" in printed
    assert "2 of 4 runs failed" in printed


def test_runs_without_a_failure_end_well(ran: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert flakes.main(["--runs", "1"]) == 0
    assert "seed 1: 3 passed" in capsys.readouterr().out


def test_a_run_without_an_end_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flakes, "_LOGS", tmp_path)
    monkeypatch.setattr(flakes.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2))
    assert flakes.main(["--runs", "1"]) == 1
    assert "make failed" in capsys.readouterr().out


def test_loops_run_beside_it_and_end_with_it() -> None:
    popen, loops = subprocess.Popen, []

    class Watched(popen):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            loops.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flakes.subprocess, "Popen", Watched)
        with flakes.load("busy"):
            assert loops and all(loop.poll() is None for loop in loops)
        assert all(loop.poll() is not None for loop in loops)


def test_files_come_in_the_order_of_the_seed_and_their_tests_in_their_own(tmp_path: Path) -> None:
    names = [f"test_{letter}" for letter in "abcdefgh"]
    for name in names:
        (tmp_path / f"{name}.py").write_text("def test_1(): pass\ndef test_2(): pass\n")
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_itemcollected\n")

    def order(seed: int) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(tmp_path), "--rootdir", str(tmp_path)]
        command += ["--random-order-bucket=module", f"--random-order-seed={seed}"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        return [line for line in done.stdout.splitlines() if "::" in line]

    one, other = order(1), order(2)
    assert sorted(one) == sorted(other) and one != other and one == order(1)
    assert [line.rpartition("::")[2] for line in one] == len(names) * ["test_1", "test_2"]
