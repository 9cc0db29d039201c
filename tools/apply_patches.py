# SPDX-License-Identifier: Apache-2.0
"""Applies, checks or reverses the patch series; see --help. Standard library only."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm_overlay.patching.cli import main

if __name__ == "__main__":
    sys.exit(main())
