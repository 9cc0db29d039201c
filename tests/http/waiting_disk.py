# SPDX-License-Identifier: Apache-2.0
"""A disk that waits to be told: a vLLM plugin for a server under test."""

from pathlib import Path

from tests.http.plugin import plugin

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
    return plugin(directory, "waiting_disk", _PLUGIN.format(gate=str(gate)))
