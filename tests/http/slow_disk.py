# SPDX-License-Identifier: Apache-2.0
"""A disk that takes its time: a vLLM plugin for a server under test, installed by an environment variable."""

import os
from pathlib import Path

_PLUGIN = """
import time

from vllm_overlay.tiers.disk.io import Device

rename = Device.rename


def slowly(self, source, target):
    time.sleep({seconds})
    rename(self, source, target)


def register():
    Device.rename = slowly
"""


def slow_disk(directory: Path, seconds_a_write: float) -> dict[str, str]:
    """Writes the plugin to ``directory``; returns the environment in which vLLM finds it."""
    package = directory / "slow_disk-1.dist-info"
    package.mkdir(parents=True)
    (directory / "slow_disk.py").write_text(_PLUGIN.format(seconds=seconds_a_write))
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-disk\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\nslow_disk = slow_disk:register\n")
    return {"PYTHONPATH": os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])}
