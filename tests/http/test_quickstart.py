# SPDX-License-Identifier: Apache-2.0
"""docs/quickstart.md does what it says: its commands are run in their order, and print what it shows."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from devtools.docs.page import Page
from tests.http.walk import SERVER, Step, Walk, WalkError, compare, steps
from tests.python_path import REPOSITORY, python_path
from tools.server_process import hold_port, port_of

PAGE = Page.read(REPOSITORY, REPOSITORY / "docs" / "quickstart.md")
INSTALLS = ("make setup\n. .venv/bin/activate", "pip install .\npython tools/apply_patches.py --installed")
"""Not run: a test must not change what it runs in. ``make test`` begins with the first."""
DIRECTORY, PORT = "/tmp/quickstart", "8000"
"""What a reader has and a test cannot: the test takes a directory of its own and a free port."""


@pytest.fixture
def directory() -> Iterator[Path]:
    """With a short name, because the server keeps sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="walk-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.engine
@pytest.mark.usefixtures("rank_in_the_core")
def test_the_quickstart_does_what_it_says(directory: Path) -> None:
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": python_path(),
        "TMPDIR": str(directory),
    }
    here = directory / "quickstart"
    with (
        hold_port() as holder,
        Walk(directory, {DIRECTORY: str(here), PORT: str(port_of(holder))}, environment) as walk,
    ):
        for step in steps(PAGE):
            if step.commands not in INSTALLS:
                walk.take(step)
    assert not here.exists()


def test_the_page_installs_in_two_ways_then_serves_twice_and_asks_three_times() -> None:
    found = list(steps(PAGE))
    assert [step.commands for step in found if "install" in step.commands or "setup" in step.commands] == [*INSTALLS]
    servers = [step for step in found if SERVER in step.commands]
    assert [step.interrupts for step in servers] == [False, True]
    assert servers[0].commands == servers[1].commands
    asked = [step for step in found if "/v1/completions" in step.commands]
    assert [step.shown.splitlines()[0] for step in asked] == [f'"cached_tokens":{n}' for n in (0, 3776, 3776)]


def test_measured_figures_may_differ_and_nothing_else() -> None:
    compare("cpu  serving  0.95  3,776 tokens  8.5 ms", "connector\n\ncpu   serving  0.80  3,776 tokens   12.0 ms\nx")
    for printed in ("cpu serving 0.95 3,712 tokens 8.5 ms", "cpu stopping 0.95 3,776 tokens 8.5 ms", ""):
        with pytest.raises(WalkError):
            compare("cpu  serving  0.95  3,776 tokens  8.5 ms", printed)


def test_a_command_that_fails_or_prints_something_else_is_told(tmp_path: Path) -> None:
    with Walk(tmp_path, {"8000": "1"}, {}) as walk:
        walk.take(Step(1, "echo 8000", "8000", interrupts=False))
        for commands, words in (
            ("false | true", "ends with status 1"),
            ("echo $UNSET_ANYWHERE", "unbound variable"),
            ("echo 2", "the page shows\n1\n"),
            (f"exit 3 # {SERVER}", "did not start"),
        ):
            with pytest.raises(WalkError, match=words), Walk(tmp_path, {"8000": "1"}, {}) as other:
                other.take(Step(1, commands, "8000", interrupts=False))


def test_a_page_that_ends_no_server_or_starts_two_is_told(tmp_path: Path) -> None:
    serving = Step(1, f"echo 'Application startup complete.'; exec sleep 600 # {SERVER}", "", interrupts=False)
    with Walk(tmp_path, {}, {}) as walk:
        with pytest.raises(WalkError, match="has not started"):
            walk.take(replace(serving, interrupts=True))
        walk.take(serving)
        with pytest.raises(WalkError, match="a second server"):
            walk.take(serving)
        walk.take(replace(serving, interrupts=True))
