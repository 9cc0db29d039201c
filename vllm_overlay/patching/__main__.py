# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_overlay.patching``: what tools/apply_patches.py does, for an installed package without a clone."""

import sys

from vllm_overlay.patching.cli import main

sys.exit(main(program="python -m vllm_overlay.patching"))
