# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-overlay`` command: one file a command."""
