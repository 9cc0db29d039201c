# SPDX-License-Identifier: Apache-2.0
"""``PYTHONPATH`` of the processes that tests start."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def python_path(*first: Path) -> str:
    """``first``, then the repository, then what the tests themselves were given: ``tests/processor``, say."""
    return os.pathsep.join([*map(str, first), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
