# SPDX-License-Identifier: Apache-2.0
"""Connectors that know nothing of the series are asked and told on the patched vLLM what they are on vLLM's own."""

import json
import os
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.patches.trees import linked_originals
from tests.python_path import python_path, run_python
from vllm_overlay.patching.installed import installed_root

SEEDS = 8


def traced(root: Path) -> list[str]:
    """The trace of random runs under the vLLM in ``root``."""
    environment = {**os.environ, "PYTHONPATH": python_path(root), "PYTHONHASHSEED": "0", "VLLM_PLUGINS": ""}
    done = run_python("-m", "tests.patches.schedule_traces", SEEDS, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *trace = done.stdout.splitlines()
    assert json.loads(first)["vllm"].startswith(str(root))
    return trace


@pytest.mark.patches
def test_a_connector_with_divergent_hits_sees_the_same_lookups_blocks_steps_and_counts(tmp_path: Path) -> None:
    installed = installed_root()
    assert installed is not None
    before, after = traced(linked_originals(tmp_path)), traced(installed)
    assert sum('"lookup"' in line for line in before) > 150
    different = [pair for pair in zip_longest(before, after) if pair[0] != pair[1]]
    assert different == []


def test_no_connector_of_vllm_completes_local_attention() -> None:
    installed = installed_root()
    assert installed is not None
    sources = (installed / "vllm/distributed").rglob("*.py")
    naming = [path.name for path in sources if "completes_local_attention" in path.read_text(encoding="utf-8")]
    assert naming == ["base.py"]
