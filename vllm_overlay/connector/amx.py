# SPDX-License-Identifier: Apache-2.0
"""Permission to use a processor's AMX tiles. Linux gives it to a process that asks."""

import torch


def ask_for_amx() -> None:
    """Called by the worker's half at start.

    vLLM 0.32.0's kernels for experts use tiles without asking. Usually oneDNN has asked before, in the first larger
    product. After a restore there may be no such product. The engine then ended with an illegal instruction.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
