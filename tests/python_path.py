# SPDX-License-Identifier: Apache-2.0
"""Python processes that tests start, and their ``PYTHONPATH``."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def python_path(*first: Path) -> str:
    """``first``, then the repository, then what the tests themselves were given: ``tests/processor``, say."""
    return os.pathsep.join([*map(str, first), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """``python *arguments`` in the repository, to its end; ``options`` are those of ``subprocess.run``."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, **{"cwd": REPOSITORY, "capture_output": True, "text": True, **options})
