# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that speak HTTP."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server compiles, for seconds of its first request, how logprobs are ranked."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


@pytest.fixture
def rank_in_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's one rank runs in its engine core, as on a GPU: one import of vLLM less."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture
def demo_directory(tmp_path: Path, tiny_model: Path) -> Path:
    """A demo's directory in which the model is there already."""
    directory = tmp_path / "demo"
    directory.mkdir()
    (directory / "model").symlink_to(tiny_model)
    return directory
