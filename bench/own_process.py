# SPDX-License-Identifier: Apache-2.0
"""An engine measured in a process of its own, so that one side leaves nothing to the next."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCHDYNAMO_DISABLE": "1",
}
"""The environment of an engine that runs in the same process."""


def measured_in_own_process(module: str, arguments: Sequence[str], **environment: str) -> dict[str, Any]:
    """What ``python -m module arguments`` prints as JSON on its last line.

    Its temporary files are removed when it is gone. Raises RuntimeError with the end of its log.
    """
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            cwd=REPOSITORY,
            env={**os.environ, **ENGINE, "TMPDIR": directory, **environment},
        )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)}: {done.stderr.decode(errors='replace')[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
