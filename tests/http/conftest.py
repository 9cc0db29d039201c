# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that speak HTTP."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch compiles for a first request, shared by all servers of the session."""
    return tmp_path_factory.mktemp("torchinductor")


@pytest.fixture
def demo_directory(tmp_path: Path, tiny_model: Path, compiled: Path) -> Path:
    """A demo's directory in which model and compiled code are there already."""
    directory = tmp_path / "demo"
    directory.mkdir()
    (directory / "model").symlink_to(tiny_model)
    (directory / "torchinductor").symlink_to(compiled)
    return directory
