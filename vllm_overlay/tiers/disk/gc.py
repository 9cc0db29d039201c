# SPDX-License-Identifier: Apache-2.0
"""Makes a root smaller by hand: leaves first, the oldest first, and nothing that a living process serves."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from vllm_overlay.common.file_lock import is_held, try_lock
from vllm_overlay.tiers.disk.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.device import Device
from vllm_overlay.tiers.disk.ledger import Ledger
from vllm_overlay.tiers.disk.listing import leaves_first
from vllm_overlay.tiers.disk.root import in_use_path
from vllm_overlay.tiers.disk.scan import namespaces_under, scan_objects

_BATCH_FILES = 64


@dataclass(slots=True)
class Collection:
    """Bytes and files of objects. ``in_use_bytes`` are those of namespaces that were left alone."""

    bytes_before: int = 0
    removed_bytes: int = 0
    removed_files: int = 0
    in_use_bytes: int = 0

    @property
    def bytes_after(self) -> int:
        return self.bytes_before - self.removed_bytes


def collect(
    root: str,
    max_bytes: int,
    dry_run: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    device: Device | None = None,
    integrity: Integrity = XXH3,
) -> Collection:
    """Bring the objects under ``root`` down to ``max_bytes``, as far as namespaces that nobody serves allow.

    Objects whose headers do not verify with ``integrity``, another key's among them, go by age alone.
    Interrupted, it leaves no child without its parent that had one. A process that starts to serve one of these
    namespaces meanwhile stores nothing until this ends. Raises OSError.
    """
    device = device or Device()
    ledger = Ledger(root, device)
    result = Collection()
    with contextlib.ExitStack() as locks:
        idle = []
        for fingerprint in namespaces_under(root):
            num_bytes = sum(file.num_bytes for file in scan_objects(root, fingerprint))
            result.bytes_before += num_bytes
            if _lock_if_idle(locks, in_use_path(root, fingerprint), dry_run):
                idle.append(fingerprint)
            else:
                result.in_use_bytes += num_bytes
        surplus = result.bytes_before - max_bytes
        paths: list[str] = []
        for item in leaves_first(root, idle, device, integrity) if surplus > 0 else ():
            if result.removed_bytes >= surplus:
                break
            result.removed_bytes += sum(file.num_bytes for file in item.files)
            result.removed_files += len(item.files)
            paths += [file.path for file in item.files]
            if len(paths) >= _BATCH_FILES and not dry_run:
                ledger.remove_files(paths)
                paths = []
            on_bytes(result.removed_bytes, surplus)
        if paths and not dry_run:
            ledger.remove_files(paths)
    return result


def _lock_if_idle(locks: contextlib.ExitStack, path: str, dry_run: bool) -> bool:
    """Whether nobody serves the namespace of this lock; but for a dry run, nobody begins to either until the end."""
    if dry_run:
        return not is_held(path)
    fd = try_lock(path)
    if fd is None:
        return False
    locks.callback(os.close, fd)
    return True
