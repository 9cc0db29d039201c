# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-overlay`` command: one file a command. Needs neither torch nor vLLM."""

from vllm_overlay.cli.command_line import main

__all__ = ["main"]
