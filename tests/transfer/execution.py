# SPDX-License-Identifier: Apache-2.0
"""Executes a table of copies in host memory, a row at a time."""

import ctypes

from vllm_overlay.transfer.copy_table import CopyTable


def execute(table: CopyTable) -> None:
    for source, target, rows, row_bytes, source_step, target_step in table.fields.T.tolist():
        for row in range(rows):
            ctypes.memmove(target + row * target_step, source + row * source_step, row_bytes)


def clear(table: CopyTable) -> None:
    """Clears the targets."""
    for _, target, rows, row_bytes, _, target_step in table.fields.T.tolist():
        for row in range(rows):
            ctypes.memset(target + row * target_step, 0, row_bytes)
