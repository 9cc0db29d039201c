# SPDX-License-Identifier: Apache-2.0
"""Suites, markers and CONTRIBUTING.md name the same, and what belongs to a suite is run by it."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from devtools import suites
from devtools.suites import OTHERS, PRODUCT, SUITES, markers, steps
from tests.python_path import REPOSITORY
from tests.test_versions import rows_of
from tests.waiting import until

OF_ALL_SUITES = {"engine", "processor", "slow"}


def test_each_marker_is_a_suites() -> None:
    options = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    found = {marker.partition(":")[0] for marker in options["markers"]}
    assert found == OF_ALL_SUITES | {suite.name for suite in OTHERS if suite.has_tests}


def test_contributing_has_a_row_for_each_suite_and_its_rooms_are_there() -> None:
    rows = rows_of(REPOSITORY / "CONTRIBUTING.md", "Which tests do I run?")
    assert [name.strip("`") for name, *_ in rows] == list(SUITES)
    rooms = [room for *_, last in rows for room in re.findall("`(.+?)`", last)]
    assert len(rooms) > 10 and all((REPOSITORY / room).exists() for room in rooms)


@pytest.mark.parametrize("module", sorted({step[0] for suite in OTHERS for step in suite.commands}))
def test_each_command_is_there(module: str) -> None:
    path = REPOSITORY.joinpath(*module.split("."))
    assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def test_a_test_is_in_one_suite(tmp_path: Path) -> None:
    """The product's are those that no other suite has; ``also`` narrows it."""
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_plain(): pass\n"
        "@pytest.mark.processor\n"
        "def test_processor(): pass\n"
        "@pytest.mark.faults\n"
        "@pytest.mark.processor\n"
        "def test_fault(): pass\n"
    )

    def found(chosen: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(tmp_path), "-m", chosen]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}

    assert found(markers(PRODUCT)) == {"test_plain", "test_processor"}
    assert found(markers(SUITES["faults"])) == {"test_fault"}
    assert found(markers(PRODUCT, "processor")) == {"test_processor"}


def test_a_suite_fails_with_the_first_of_its_steps_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    suite, ran = SUITES["faults"], []

    def run(step: suites.Command, environment: dict[str, str]) -> int:
        ran.append(step)
        return 3 if step == steps(suite)[1] else 0

    monkeypatch.setattr(suites, "_run", run)
    assert suites.main(["faults"]) == 3
    assert ran == steps(suite)[:2]


def test_all_suites_go_on_when_one_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suites, "_LOGS", tmp_path)
    monkeypatch.setattr(suites, "_run", lambda step, *_: int(step[0] == "tests.matrix"))
    assert suites.main(["all"]) == 1
    printed = capsys.readouterr().out
    assert "failed: ['models']" in printed and "upstream: passed" in printed


def test_a_suite_that_takes_long_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def is_said(line: str) -> bool:
        said.append(capsys.readouterr().out)
        return line in "".join(said)

    def run(step: suites.Command, environment: dict[str, str], output: int) -> int:
        os.write(output, b"10 of 30\n20 of 30\n3")
        until(lambda: is_said("upstream: 20 of 30\n"), "a line about upstream")
        return 0

    monkeypatch.setattr(suites, "_LOGS", tmp_path)
    monkeypatch.setattr(suites, "SUITES", {"upstream": SUITES["upstream"]})
    monkeypatch.setattr(suites, "_SAID_EVERY_S", 0.01)
    monkeypatch.setattr(suites, "_run", run)
    assert suites.main(["all"]) == 0


def test_a_command_has_what_engines_share_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "say.py").write_text("import os\nprint(os.environ['OMP_WAIT_POLICY'], os.environ['NUMBA_CACHE_DIR'])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "mine")
    with (tmp_path / "said").open("w") as output:
        assert suites._run(("say",), {}, output.fileno()) == 0
    assert (tmp_path / "said").read_text().split() == ["passive", "mine"]
