# SPDX-License-Identifier: Apache-2.0
"""Unlinks the files of objects whose rows are gone, and tells the catalogue when they are."""

import logging
from collections.abc import Iterable, Sequence

from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.tiers.disk.catalogue import BATCH_ROWS, Catalogue, Name, RemovedObject, StoredObject
from vllm_overlay.tiers.disk.files.device import Device, is_missing
from vllm_overlay.tiers.disk.files.namespace import object_path
from vllm_overlay.tiers.disk.thread_pool import in_threads

UNLINK_THREADS = 4
"""Threads that unlink. A file system keeps a caller of unlink waiting, for milliseconds when it is busy, and uses
little of the processor."""
_log = RateLimitedLog(logging.getLogger(__name__))


class Remover:
    """Called in one thread, the bookkeeper's or a tool's. Methods raise CatalogueError.

    ``num_threads`` files are unlinked at once. A tool has one thread, because Ctrl-C interrupts it.
    """

    def __init__(self, catalogue: Catalogue, root: str, device: Device, num_threads: int = 1) -> None:
        self._catalogue = catalogue
        self._root = root
        self.device = device
        self._num_threads = num_threads
        self._pending: list[RemovedObject] = []
        self._stuck: list[RemovedObject] = []

    @property
    def num_stuck(self) -> int:
        """How many objects could not be unlinked."""
        return len(self._pending) + len(self._stuck)

    def is_there(self, item: StoredObject) -> bool:
        """Whether no file of the object is missing."""
        paths = self.paths_of(item.name, item.world_size)
        return not any(is_missing(self.device, path) for path in paths)

    def paths_of(self, name: Name, world_size: int) -> list[str]:
        """The files of all ranks of an object."""
        return [object_path(self._root, name.fingerprint, name.object_id, rank) for rank in range(world_size)]

    def remove(self, names: Iterable[Name]) -> int:
        """Remove objects and everything on top of them. Returns how many objects went."""
        count = 0
        for removed in self._catalogue.remove(names):
            count += len(removed)
            self.finish(removed)
        return count

    def finish(self, removed: Sequence[RemovedObject] = (), keep_bytes: int = 0, capacity_bytes: int = 0) -> int:
        """Unlink the files of objects whose removal has begun, and of those that failed before.

        Returns how many bytes became this process's room (see ``Catalogue.end_removal``). A file that cannot be
        unlinked now keeps its bytes and its name until the next call.
        """
        self._pending += [*removed, *self._stuck]
        self._stuck = []
        kept = 0
        while batch := self._pending[:BATCH_ROWS]:
            is_gone = in_threads(self._unlink, batch, self._num_threads)
            gone = [item for item, is_this_gone in zip(batch, is_gone, strict=True) if is_this_gone]
            stuck = [item for item, is_this_gone in zip(batch, is_gone, strict=True) if not is_this_gone]
            if gone:
                names = [item.name for item in gone]
                kept += self._catalogue.end_removal(names, max(0, keep_bytes - kept), capacity_bytes)
            self._stuck += stuck
            del self._pending[: len(batch)]
        return kept

    def _unlink(self, item: RemovedObject) -> bool:
        return self.unlink_all(self.paths_of(item.name, item.world_size))

    def unlink_all(self, paths: Iterable[str]) -> bool:
        """Whether none of these files is there any more."""
        is_gone = True
        for path in paths:
            try:
                self.device.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                is_gone = False
                _log.warning("unlink", "disk tier: a file cannot be removed now: %s", error)
        return is_gone
