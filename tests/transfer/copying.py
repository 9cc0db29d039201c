# SPDX-License-Identifier: Apache-2.0
"""Copies of a transfer whose copies have ended when they are submitted."""

from typing import Any

from vllm_overlay.transfer.cpu import CpuTransfer


def copied(transfer: CpuTransfer, way: str, *arguments: Any) -> None:
    """Submits a copy, which has ended then; raises what it failed with."""
    handle = getattr(transfer, way)(*arguments)
    (finished,) = transfer.poll()
    assert finished.handle == handle and transfer.poll() == []
    if finished.error is not None:
        raise finished.error
