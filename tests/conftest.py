# SPDX-License-Identifier: Apache-2.0
"""Fixtures that tests of several rooms share."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.engine.states import STATES, States


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that: tests of Ctrl-C need it heard.

    Engines share cores: threads of torch that spin while they wait would take the time of another's that work. And no
    example of hypothesis fails because the machine is busy.
    """
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny hybrid model: Qwen3.5 with three GDN layers and one full attention; its N: tests/engine/states.py."""
    from tools.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", params=STATES, ids=str)
def states(request: pytest.FixtureRequest) -> States:
    """Each dtype that recurrent states can have: what asks for this runs with both, on every machine."""
    found: States = request.param
    return found
