# SPDX-License-Identifier: Apache-2.0
"""Applies, checks or reverses the patch series; see --help. Standard library only."""

import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 (a checkout may be patched with a distribution's Python)
    sys.exit(f"apply_patches.py needs Python 3.11, and this is {sys.version.split()[0]}: run it with vLLM's own")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm_overlay.patching.cli import main

if __name__ == "__main__":
    sys.exit(main())
