# SPDX-License-Identifier: Apache-2.0
"""A disk that waits to be told: a vLLM plugin for a server under test, installed by an environment variable."""

import os
from pathlib import Path

_PLUGIN = """
import os
import time

from vllm_overlay.tiers.disk.files.device import Device

rename = Device.rename


def when_told(self, source, target):
    while not target.endswith(".json") and not os.path.exists({gate!r}):
        time.sleep(0.01)
    rename(self, source, target)


def register():
    Device.rename = when_told
"""


def waiting_disk(directory: Path, gate: Path) -> dict[str, str]:
    """Writes the plugin to ``directory``; returns the environment in which vLLM finds it.

    No object gets its name until the file ``gate`` is there.
    """
    package = directory / "waiting_disk-1.dist-info"
    package.mkdir(parents=True)
    (directory / "waiting_disk.py").write_text(_PLUGIN.format(gate=str(gate)))
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: waiting-disk\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\nwaiting_disk = waiting_disk:register\n")
    return {"PYTHONPATH": os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])}
