# SPDX-License-Identifier: Apache-2.0
"""Roots of versions before 0.3.0. They are taken over when nobody uses them, and kept from those versions
afterwards."""

import contextlib
import os

from vllm_overlay.common.file_lock import is_held
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files.device import Device, make_directory
from vllm_overlay.tiers.disk.files.recognition import LEASES, LEDGER


def take_over(device: Device, root: str) -> None:
    """Called before a root is marked. Raises ConfigError while a process of an earlier version uses it, and OSError.

    An earlier version counts bytes in a file named ``ledger``. A directory of that name keeps it from storing and,
    above all, from removing what it cannot read.
    """
    leases = os.path.join(root, LEASES)
    names = [name for name in os.listdir(leases) if name.isdecimal()] if os.path.isdir(leases) else []
    for name in names:
        if is_held(os.path.join(leases, name)):
            raise ConfigError(
                f"root={root!r} is used by a process of vllm-overlay before 0.3.0, which keeps {LEASES}/{name} locked: "
                "stop that server first, or set root to another directory"
            )
    for name in names:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # the other half was faster, or it is no lease
            device.unlink(os.path.join(leases, name))
    with contextlib.suppress(OSError):  # a stranger's file in it stays
        os.rmdir(leases)
    ledger = os.path.join(root, LEDGER)
    if not os.path.isdir(ledger):
        with contextlib.suppress(FileNotFoundError):
            device.unlink(ledger)
        make_directory(device, ledger)
