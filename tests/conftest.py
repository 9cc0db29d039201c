# SPDX-License-Identifier: Apache-2.0
"""Fixtures that tests of several rooms share."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from devtools.suites import ENGINES_SHARE
from tests.engine.states import BFLOAT16, FLOAT32, States

if TYPE_CHECKING:
    from tests.engine.client import Engine

Judges = Callable[[States, dict[str, Any]], "Engine"]


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C need it heard.

    No example of hypothesis fails because the machine is busy. It tries the same examples in each run, so that a change
    is judged by what it changes. With ``FRESH_EXAMPLES=1`` it tries others.
    """
    is_fresh = os.environ.get("FRESH_EXAMPLES") == "1"
    settings.register_profile(
        "busy", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not is_fresh
    )
    settings.load_profile("busy")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(ENGINES_SHARE | os.environ)


SET_BY_VLLM = {"VLLM_WORKER_MULTIPROC_METHOD", "VLLM_DISABLE_SHARED_EXPERTS_STREAM", "VLLM_SSM_CONV_STATE_LAYOUT"}
"""For good, when a config for the CPU is made."""


def settings_of_the_process() -> object:
    """What decides how vLLM behaves and logs in this process and in the engines that it starts."""
    ours = {name for name in os.environ if name.startswith(("VLLM_", "TINY_MODEL"))} - SET_BY_VLLM
    return {name: os.environ[name] for name in ours}, logging.root.manager.disable


AT_START = settings_of_the_process()


def pytest_itemcollected(item: pytest.Item) -> None:
    """In a random order of files (devtools/flakes.py) the tests of a file keep theirs: they share engines."""
    item.add_marker(pytest.mark.random_order(disabled=True))


def pytest_collection_finish() -> None:
    """An import that sets a variable for good would change the tests of its process, in some orders only."""
    if settings_of_the_process() != AT_START:
        raise pytest.UsageError(f"a module that tests import changed {AT_START} to {settings_of_the_process()}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The report of a test that failed shows the engines that ran: one may differ from the others for all its life."""
    report = yield
    if report.failed and "tests.engine.client" in sys.modules:
        for engine in sys.modules["tests.engine.client"].RUNNING:
            report.sections.append((f"Engine {engine.pid} of {item.nodeid}", engine.report))
    return report


@pytest.fixture(autouse=True)
def no_test_changes_what_later_ones_run_with() -> Iterator[None]:
    """As above, of what a test calls; the test's own monkeypatch is undone before this looks."""
    before = settings_of_the_process()
    yield
    assert settings_of_the_process() == before


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny hybrid model: Qwen3.5 with three GDN layers and one full attention; its N: tests/engine/states.py."""
    from tools.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def judges(tiny_model: Path) -> Iterator["Judges"]:
    """Engines without a connector, for all tests of this process: one for each states and arguments (``bar.py``)."""
    from tests.engine.client import Engine

    with contextlib.ExitStack() as engines:
        running: dict[str, Engine] = {}

        def judge(states: States, arguments: dict[str, Any]) -> Engine:
            key = f"{states} {arguments}"
            if key not in running:
                running[key] = engines.enter_context(Engine(tiny_model, **states.arguments, **arguments))
            return running[key]

        yield judge


@pytest.fixture(scope="module", params=[FLOAT32, pytest.param(BFLOAT16, marks=pytest.mark.engines)], ids=str)
def states(request: pytest.FixtureRequest) -> States:
    """Each dtype that recurrent states can have: what asks for this runs with both, on every machine, in two suites."""
    found: States = request.param
    return found
