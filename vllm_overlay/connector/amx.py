# SPDX-License-Identifier: Apache-2.0
"""Leave to use a processor's AMX tiles, which Linux gives to a process that asks for it."""

import torch


def ask_for_amx() -> None:
    """Called by the worker's half at start.

    vLLM 0.32.0's kernels for experts use tiles without asking. Usually oneDNN has asked before, in the first larger
    product. A restored prompt may leave no such product: the engine then ended with an illegal instruction.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
