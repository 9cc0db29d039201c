# SPDX-License-Identifier: Apache-2.0
"""Tells the scheduler what the catalogue has of the served namespace, and what changes there, whoever did it."""

from collections.abc import Iterable

import msgspec

from vllm_overlay.planner.objects import PlannedObject
from vllm_overlay.tiers.disk.catalogue import Catalogue, FellBehind, Gone, StoredObject
from vllm_overlay.tiers.disk.files.format import file_bytes
from vllm_overlay.tiers.disk.files.writer import MAX_NUMBER
from vllm_overlay.tiers.disk.messages import Found, Reload, ServedNamespace

_OBJECTS_AN_UPDATE = 64
_MAX_WAITING = 4096
"""So many updates may wait for the scheduler; an idle one takes none."""


class Follower:
    """Called in the bookkeeper's thread. Raises CatalogueError."""

    def __init__(self, catalogue: Catalogue, served: ServedNamespace, world_size: int) -> None:
        self._catalogue, self._served, self._world_size = catalogue, served, world_size
        self._namespace = served.namespace
        self._seq: int | None = None

    def follow(self, is_complete: bool) -> bool:
        """Tell of what has changed since the last call; returns whether to call again at once. ``is_complete``: all
        files were known before this call."""
        if len(self._served.updates) > _MAX_WAITING:
            return False
        if self._seq is None:
            if self._served.is_loaded and not is_complete:
                return False  # what the scheduler knows is still there; a rebuild is about to find it
            self._load()
        has_more = self._read_changes()
        if is_complete and not has_more and self._seq is not None:
            self._served.is_complete = True
        return has_more

    def _load(self) -> None:
        seq, slices = self._catalogue.load(self._namespace.fingerprint)
        self._served.updates.append(Reload.BEGINS)
        for found in slices:
            self._tell(found)
        self._served.updates.append(Reload.ENDS)
        self._seq = seq
        self._served.is_loaded = True

    def _read_changes(self) -> bool:
        assert self._seq is not None
        try:
            changes = self._catalogue.changes_since(self._seq, self._namespace.fingerprint)
        except FellBehind:
            self._seq = None
            return True
        found: list[StoredObject] = []
        for change in changes.changes:
            if isinstance(change, StoredObject):
                found.append(change)
                continue
            self._tell(found)
            found = []
            if (object_id := self._namespace.own_id(change.object_id)) is not None:
                self._served.updates.append(Gone(object_id, change.file))
        self._tell(found)
        self._seq = changes.seq
        return changes.has_more

    def _tell(self, found: Iterable[StoredObject]) -> None:
        known = [(planned, item.file) for item in found if (planned := self._known(item)) is not None]
        for start in range(0, len(known), _OBJECTS_AN_UPDATE):
            objects, files = zip(*known[start : start + _OBJECTS_AN_UPDATE], strict=True)
            self._served.updates.append(Found(objects, files))

    def _known(self, item: StoredObject) -> PlannedObject | None:
        """The object if its row is what a store of this engine would have written."""
        num_bytes = file_bytes(item.planned.num_bytes) * self._world_size
        if item.world_size != self._world_size or item.num_bytes != num_bytes or item.file.number > MAX_NUMBER:
            return None
        planned = self._namespace.own(item.planned)
        return None if planned is None else msgspec.structs.replace(planned, num_bytes=num_bytes)
