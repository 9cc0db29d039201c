# SPDX-License-Identifier: Apache-2.0
"""Other namespaces under the same root, and what of theirs may go when there is no room."""

import contextlib
import logging
import math
import os
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
_BATCH_OBJECTS = 64
_ORDER_S = 30.0
"""For so long no object of a scan is thought to have got children."""
logger = logging.getLogger(__name__)


class _Order:
    """Objects of some namespaces, none before what depends on it.

    A scan reads every header. So its order serves while it lasts and is young, and after a useless one the next waits.
    """

    def __init__(self, scan: Callable[[list[str]], Iterator[WholeObject]]) -> None:
        self._scan = scan
        self._leaves: Iterator[WholeObject] = iter(())
        self._of: frozenset[str] = frozenset()
        self._scanned = -math.inf
        self._is_new = False
        self.was_useful = False
        """Whether something of the last scan was removed."""

    def take(self, fingerprints: Iterable[str]) -> Iterator[WholeObject]:
        """Goes on where the last call has stopped."""
        wanted = frozenset(fingerprints)
        age = time.monotonic() - self._scanned
        if age < _ORDER_S:
            yield from self._rest(wanted)
        if self.was_useful or wanted != self._of or age > SCAN_PAUSE_S:
            self._of, self._scanned, self.was_useful, self._is_new = wanted, time.monotonic(), False, True
            self._leaves = self._scan(sorted(wanted))
            yield from self._rest(wanted)

    def _rest(self, wanted: frozenset[str]) -> Iterator[WholeObject]:
        while (leaf := next(self._leaves, None)) is not None:
            if self._is_new:  # the scan has just read all headers, and may have taken long
                self._scanned, self._is_new = time.monotonic(), False
            if leaf.fingerprint in wanted:
                yield leaf


class ForeignEviction:
    """Called in the reclaimer's thread; every method may wait for the disk and raises OSError.

    A namespace is *idle* while no process holds the shared lock in it: its model is not served, perhaps never again,
    so its objects go before any that somebody uses.
    """

    def __init__(self, root: str, ledger: Ledger, device: Device, integrity: Integrity) -> None:
        self._root = root
        self._ledger = ledger
        self._device = device

        def scan(fingerprints: list[str]) -> Iterator[WholeObject]:
            return leaves_first(root, fingerprints, device, integrity)

        self._idle, self._used, self._shared = (_Order(scan) for _ in range(3))
        self.own: tuple[str, ...] = ()
        """The fingerprints that this process serves."""

    def _others(self) -> list[str]:
        return [fingerprint for fingerprint in namespaces_under(self._root) if fingerprint not in self.own]

    def remove_idle(self, num_bytes: int) -> int:
        """Remove objects of idle namespaces, ``num_bytes`` of them or all there are; returns the bytes.

        Leaves go first, the oldest of them before others: what is left can be reached.
        """
        with self._locked_if_idle(self._others()) as idle:
            removed = self._remove(self._idle, idle, num_bytes)
            if removed < num_bytes:
                for fingerprint in idle:
                    self._remove_directory(fingerprint)
        return removed

    def remove_abandoned_namespaces(self) -> None:
        """Remove idle namespaces that say of themselves that a reset began them: nobody will serve them again.

        Also directories without ``namespace.json`` and without objects. One with objects may be anybody's: that file
        fails to be written, or is removed, while its objects are right.
        """
        others = {each: manifest_or_empty(os.path.join(self._root, each)) for each in self._others()}
        abandoned = [each for each, manifest in others.items() if manifest.is_of_one_process]
        with self._locked_if_idle(abandoned) as idle:
            self._ledger.remove_files([file.path for each in idle for file in scan_objects(self._root, each)])
            for fingerprint in idle:
                self._remove_directory(fingerprint)
        unnamed = [each for each in self._others() if not os.path.lexists(os.path.join(self._root, each, DESCRIPTION))]
        with self._locked_if_idle(unnamed) as idle:
            for fingerprint in idle:
                self._remove_directory(fingerprint)

    @contextlib.contextmanager
    def _locked_if_idle(self, fingerprints: Iterable[str]) -> Iterator[list[str]]:
        """Those that nobody serves, and nobody begins to serve meanwhile."""
        with contextlib.ExitStack() as locks:
            idle = []
            for fingerprint in fingerprints:
                if (fd := try_lock(in_use_path(self._root, fingerprint))) is not None:
                    locks.callback(os.close, fd)
                    idle.append(fingerprint)
            yield idle

    def remove_used(self, num_bytes: int) -> int:
        """The same of all other namespaces. Their processes will find these objects missing."""
        return self._remove(self._used, self._others(), num_bytes)

    def remove_shared(self, num_bytes: int, is_ours: Callable[[ObjectId], bool]) -> int:
        """The same of our own namespaces: what others have stored there and we do not know."""
        return self._remove(self._shared, self.own, num_bytes, lambda object_id: not is_ours(object_id))

    def _remove(
        self,
        order: _Order,
        fingerprints: Iterable[str],
        num_bytes: int,
        may_go: Callable[[ObjectId], bool] = lambda object_id: True,
    ) -> int:
        removed = 0
        leaves = (leaf for leaf in order.take(fingerprints) if may_go(leaf.object_id))
        while removed < num_bytes and (batch := _take(leaves, num_bytes - removed)):
            removed += self._ledger.remove_files([file.path for leaf in batch for file in leaf.files])
        if removed:
            order.was_useful = True
            logger.info("disk tier: removed %d bytes of others under %s", removed, self._root)
        return removed

    def _remove_directory(self, fingerprint: str) -> None:
        """Called when its lock is ours; stays when it holds an object or a file of somebody's."""
        top = os.path.join(self._root, fingerprint)
        with contextlib.suppress(OSError):
            for name in filter(FAN_OUT.fullmatch, os.listdir(top)):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(top, name))
            if set(os.listdir(top)) <= {IN_USE, DESCRIPTION}:
                remove_quietly(self._device, os.path.join(top, DESCRIPTION))
                remove_quietly(self._device, in_use_path(self._root, fingerprint))
                os.rmdir(top)


def _take(leaves: Iterator[WholeObject], num_bytes: int) -> list[WholeObject]:
    """The next ones of ``num_bytes`` together, but not more than a few: each batch takes the ledger's lock once."""
    batch: list[WholeObject] = []
    while num_bytes > 0 and len(batch) < _BATCH_OBJECTS and (leaf := next(leaves, None)) is not None:
        batch.append(leaf)
        num_bytes -= sum(file.num_bytes for file in leaf.files)
    return batch
