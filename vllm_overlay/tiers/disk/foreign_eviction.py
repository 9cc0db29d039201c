# SPDX-License-Identifier: Apache-2.0
"""Other namespaces under the same root, and what of theirs may go when there is no room."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from vllm_overlay.common.file_lock import try_lock
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.checksum import Integrity
from vllm_overlay.tiers.disk.device import Device, remove_quietly
from vllm_overlay.tiers.disk.ledger import Ledger
from vllm_overlay.tiers.disk.listing import WholeObject, leaves_first
from vllm_overlay.tiers.disk.manifest import manifest_or_empty
from vllm_overlay.tiers.disk.namespace import DESCRIPTION, IN_USE
from vllm_overlay.tiers.disk.root import in_use_path
from vllm_overlay.tiers.disk.scan import FAN_OUT, namespaces_under, scan_objects

SCAN_PAUSE_S = 5.0
logger = logging.getLogger(__name__)


class ForeignEviction:
    """Called in the reclaimer's thread; every method may wait for the disk and raises OSError.

    A namespace is *idle* while no process holds the shared lock in it: its model is not served, perhaps never again,
    so its objects go before any that somebody uses.
    """

    def __init__(self, root: str, ledger: Ledger, device: Device, integrity: Integrity) -> None:
        self._root = root
        self._ledger = ledger
        self._device = device
        self._integrity = integrity
        self._shared: Iterator[WholeObject] = iter(())
        self._next_scan = 0.0
        self.own: tuple[str, ...] = ()
        """The fingerprints that this process serves."""

    def _others(self) -> list[str]:
        return [fingerprint for fingerprint in namespaces_under(self._root) if fingerprint not in self.own]

    def remove_idle(self, num_bytes: int) -> int:
        """Remove the oldest objects of idle namespaces, ``num_bytes`` of them or all there are; returns the bytes."""
        return self._remove_idle(self._others(), num_bytes)

    def remove_abandoned_namespaces(self) -> None:
        """Remove idle namespaces that nobody will serve again: those that a reset began, in whatever process.

        Also those without words: whoever began one was killed before it could say whether it is such a one.
        """
        self._remove_idle([each for each in self._others() if self._is_abandoned(each)], sys.maxsize)

    def _is_abandoned(self, fingerprint: str) -> bool:
        directory = os.path.join(self._root, fingerprint)
        return (
            not os.path.lexists(os.path.join(directory, DESCRIPTION)) or manifest_or_empty(directory).is_of_one_process
        )

    def _remove_idle(self, fingerprints: Iterable[str], num_bytes: int) -> int:
        with contextlib.ExitStack() as locks:
            idle = []
            for fingerprint in fingerprints:
                if (fd := try_lock(in_use_path(self._root, fingerprint))) is not None:
                    locks.callback(os.close, fd)
                    idle.append(fingerprint)
            removed = self._remove_oldest(idle, num_bytes)
            if removed < num_bytes:
                for fingerprint in idle:
                    self._remove_directory(fingerprint)
        return removed

    def remove_used(self, num_bytes: int) -> int:
        """The same of all other namespaces. Their processes will find these objects missing."""
        return self._remove_oldest(self._others(), num_bytes)

    def remove_shared(self, num_bytes: int, is_ours: Callable[[ObjectId], bool]) -> int:
        """The same of our own namespaces, leaves first: what others have stored there and we do not know.

        A scan reads every header, so its order serves for as long as it lasts, and the next one waits a while.
        """
        removed = self._remove_leaves(num_bytes, is_ours)
        if not removed and time.monotonic() > self._next_scan:
            self._next_scan = time.monotonic() + SCAN_PAUSE_S
            self._shared = leaves_first(self._root, list(self.own), self._device, self._integrity)
            removed = self._remove_leaves(num_bytes, is_ours)
        return removed

    def _remove_leaves(self, num_bytes: int, is_ours: Callable[[ObjectId], bool]) -> int:
        removed = 0
        while removed < num_bytes and (leaf := next(self._shared, None)) is not None:
            if not is_ours(leaf.object_id):
                removed += self._ledger.remove_files([file.path for file in leaf.files])
        return removed

    def _remove_oldest(self, fingerprints: Iterable[str], num_bytes: int) -> int:
        files = [file for fingerprint in fingerprints for file in scan_objects(self._root, fingerprint)]
        paths: list[str] = []
        for file in sorted(files, key=lambda file: file.mtime):
            if num_bytes <= 0:
                break
            paths.append(file.path)
            num_bytes -= file.num_bytes
        removed = self._ledger.remove_files(paths)
        if removed:
            logger.info("disk tier: removed %d bytes of other namespaces under %s", removed, self._root)
        return removed

    def _remove_directory(self, fingerprint: str) -> None:
        """Called when it holds no object and its lock is ours; stays when a file of somebody's is in it."""
        top = os.path.join(self._root, fingerprint)
        with contextlib.suppress(OSError):
            for name in filter(FAN_OUT.fullmatch, os.listdir(top)):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(top, name))
            if set(os.listdir(top)) <= {IN_USE, DESCRIPTION}:
                remove_quietly(self._device, os.path.join(top, DESCRIPTION))
                remove_quietly(self._device, in_use_path(self._root, fingerprint))
                os.rmdir(top)
