# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_overlay``: the same as ``vllm-overlay``."""

import sys

from vllm_overlay.cli.command_line import main

sys.exit(main())
