# SPDX-License-Identifier: Apache-2.0
"""What a process holds of a root while it serves, all of it by locks: a lease's slot, and its namespaces."""

import logging
import os
import time

from vllm_overlay.common.backoff import Backoff
from vllm_overlay.common.file_lock import is_in_place, lock
from vllm_overlay.tiers.disk.device import Device, make_directory
from vllm_overlay.tiers.disk.ledger import Ledger
from vllm_overlay.tiers.disk.manifest import write_manifest
from vllm_overlay.tiers.disk.marker import is_marked, require_marker
from vllm_overlay.tiers.disk.namespace import DESCRIPTION, DiskNamespace
from vllm_overlay.tiers.disk.root import in_use_path, lock_directory, open_with_locks

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
logger = logging.getLogger(__name__)


class Membership:
    """Called in the reclaimer's thread; every method may wait for the disk and raises OSError."""

    def __init__(self, root: str, ledger: Ledger, device: Device, has_key: bool = False) -> None:
        self._root = root
        self._has_key = has_key
        self._ledger = ledger
        self._device = device
        self._slot_fd = -1
        self._held: dict[str, int] = {}
        self.slot: int | None = None
        self.namespace: DiskNamespace | None = None
        self._described: set[str] = set()
        self._description_pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def take(self, namespace: DiskNamespace) -> None:
        """Lock everything anew, under a root that is made if it is not there. Raises ConfigError like ``open_root``."""
        self.let_go()
        open_with_locks(self._device, self._root, self._has_key)
        require_marker(self._root)  # a full disk takes none
        self.serve(namespace)
        self.slot, self._slot_fd = self._ledger.claim_slot()

    def serve(self, namespace: DiskNamespace) -> None:
        """Tell the others that these directories are in use, and no longer those served before."""
        before, self._held = self._held, {}
        self._described = set()
        try:
            for fingerprint in namespace.fingerprints:
                directory = os.path.join(self._root, fingerprint)
                make_directory(self._device, directory)
                path = in_use_path(self._root, fingerprint)
                make_directory(self._device, os.path.dirname(path))
                self._held[path] = lock(path, shared=True)
            self.namespace = namespace
        finally:
            for fd in before.values():
                os.close(fd)

    def describe(self, is_last: bool = False) -> None:
        """Write ``namespace.json`` of what is served: once, and again where it is missing.

        Called at each turn. After a failure it pauses, but not when ``is_last``. Nobody who serves waits for it.
        """
        if self.namespace is None or not (is_last or self._description_pauses.may_try(time.monotonic())):
            return
        written = [self._write_manifest(self.namespace, each) for each in self._undescribed(self.namespace)]
        if written:
            pauses = self._description_pauses
            (pauses.succeeded if all(written) else pauses.failed)(time.monotonic())

    def _undescribed(self, namespace: DiskNamespace) -> list[str]:
        """The fingerprints of which this process has not said what they are, or whose file is gone."""
        return [
            fingerprint
            for fingerprint in namespace.fingerprints
            if fingerprint not in self._described
            or not os.path.lexists(os.path.join(self._root, fingerprint, DESCRIPTION))
        ]

    def _write_manifest(self, namespace: DiskNamespace, fingerprint: str) -> bool:
        is_written = write_manifest(self._device, os.path.join(self._root, fingerprint), namespace, fingerprint)
        (self._described.add if is_written else self._described.discard)(fingerprint)
        return is_written

    def is_lost(self) -> bool:
        """Whether something we keep locked is not there any more: the root was removed, replaced or unmounted."""
        if self.slot is None:
            return False
        held = {**self._held, self._ledger.path_of_slot(self.slot): self._slot_fd}
        is_whole = is_marked(self._root) and is_marked(lock_directory(self._root))
        return not (is_whole and all(is_in_place(path, fd) for path, fd in held.items()))

    def let_go(self) -> None:
        """The others may take our lease and remove our objects from now on."""
        self.stop_serving()
        if self.slot is not None:
            os.close(self._slot_fd)
            self.slot = None

    def stop_serving(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])
        self.namespace = None
