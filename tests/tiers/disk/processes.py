# SPDX-License-Identifier: Apache-2.0
"""Processes of their own, to be killed."""

import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
WRITER = """
import sys
from pathlib import Path
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import TierPair
made = TierPair(Path(sys.argv[1])).recovered()
print("ready", flush=True)
for turn in range(10_000):
    # Others may take a parent while its child waits for room: then the child is given up, as the connector does.
    assert {made.outcome(planned) for planned in chain(f"{sys.argv[2]}-{turn}", 3)} <= {"", "no_parent"}
"""


def start(source: str, *arguments: object) -> "subprocess.Popen[str]":
    """A process that has said "ready". Its input stays open until ``kill``."""
    process = subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
