# SPDX-License-Identifier: Apache-2.0
"""The name that ``vllm_overlay.patching`` had in 0.1.0, kept to say so to scripts that use it."""

import sys

_MOVED = "vllm_overlay.patch_series is vllm_overlay.patching since 0.2.0: run `python -m vllm_overlay.patching`"

if __name__ == "__main__":
    sys.exit(_MOVED)
raise ImportError(_MOVED)
