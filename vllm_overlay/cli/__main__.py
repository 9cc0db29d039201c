# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_overlay.cli``: the same as ``vllm-overlay``, as in 0.1.0."""

import sys

from vllm_overlay.cli.command_line import main

sys.exit(main())
