# SPDX-License-Identifier: Apache-2.0
"""What a server will have before it is started: blocks, bytes, what each tier holds, and the command. No engine here.

``vllm_overlay/dry_start.py`` is the only part that knows vLLM. It runs in a process of its own.
"""
