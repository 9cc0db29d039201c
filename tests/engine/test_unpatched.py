# SPDX-License-Identifier: Apache-2.0
"""Our connectors do not start on a vLLM that lacks a patch; the refusal names the command that applies it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.client import Engine, EngineError, cpu_child, multi
from tests.patches.trees import linked_originals
from tests.python_path import python_path

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a process that imports a copy of vLLM with every touched file as it came."""
    directory = tmp_path_factory.mktemp("unpatched")
    linked_originals(directory)
    yield {"PYTHONPATH": python_path(directory)}
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize(
    "config",
    [multi(cpu_child()), pytest.param(cpu_child(), marks=pytest.mark.engines)],
    ids=["in a MultiConnector", "alone"],
)
def test_an_unpatched_vllm_is_refused_with_the_command_that_helps(
    tiny_model: Path, unpatched: dict[str, str], config: dict[str, Any]
) -> None:
    with (
        pytest.raises(
            EngineError,
            match=r"UnpatchedError.*lacks the \d+ patches.*run `python \S*tools/apply_patches.py --installed`",
        ),
        Engine(tiny_model, unpatched, launcher=("env",), kv_transfer_config=config),
    ):
        pass
