# SPDX-License-Identifier: Apache-2.0
"""A disk that waits to be told: a vLLM plugin for a server under test."""

from pathlib import Path

from tests.http.plugin import plugin

_PLUGIN = """
import os
import time

from vllm_overlay.tiers.disk.files.device import Device

pwritev = Device.pwritev


def when_told(self, fd, segments, offset):
    while len(segments) > 1 and not os.path.exists({gate!r}):
        time.sleep(0.01)
    return pwritev(self, fd, segments, offset)


def register():
    Device.pwritev = when_told
"""


def waiting_disk(directory: Path, gate: Path) -> dict[str, str]:
    """Writes the plugin to ``directory``; returns the environment in which vLLM finds it.

    No object gets its bytes until the file ``gate`` is there.
    """
    return plugin(directory, "waiting_disk", _PLUGIN.format(gate=str(gate)))
