# SPDX-License-Identifier: Apache-2.0
"""Carries out, in order, what the scheduler has decided about objects: stored, discarded, removed."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import BATCH_ROWS, Catalogue, Name, StoredObject
from vllm_overlay.tiers.disk.catalogue.room import Room
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.maintenance.remover import Remover
from vllm_overlay.tiers.disk.updates import Committed, Forgotten, Refused, ServedNamespace


@dataclass(frozen=True, slots=True)
class Stored:
    """All ranks' files of an object are in place. Its parents are held, and its bytes taken from the room."""

    served: ServedNamespace
    item: StoredObject


@dataclass(frozen=True, slots=True)
class Discarded:
    """A store has failed, or nobody wants its object: whatever files it left are of no use."""

    served: ServedNamespace
    item: StoredObject


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nobody shall load this object any more, nor what depends on it."""

    served: ServedNamespace
    object_id: ObjectId


@dataclass(frozen=True, slots=True)
class Moved:
    """From here on another namespace is served."""

    served: ServedNamespace


Step = Stored | Discarded | Dropped | Moved


class Committer:
    """Called in the bookkeeper's thread. Raises CatalogueError; then the steps that are left are tried again."""

    def __init__(
        self,
        catalogue: Catalogue,
        remover: Remover,
        room: Room,
        device: Device,
        move: Callable[[ServedNamespace], None],
    ) -> None:
        self._catalogue = catalogue
        self._remover = remover
        self._room = room
        self._device = device
        self._move = move

    def carry_out(self, steps: deque[Step]) -> None:
        """Take away what is done. Another thread may append meanwhile."""
        while steps:
            if stored := _leading_stores(steps):
                self._commit(stored)
            else:
                self._carry_out(steps[0])
            for _ in range(max(1, len(stored))):
                steps.popleft()

    def _carry_out(self, step: Step) -> None:
        match step:
            case Stored():
                self._commit([step])
            case Discarded(served, item):
                self._discard(served, item)
                served.updates.append(Forgotten(item.planned.object_id))
            case Dropped(served, object_id):
                self._remover.remove([Name(served.namespace.fingerprint_of(object_id.tag), object_id)])
                served.updates.append(Forgotten(object_id))
            case Moved(served):
                self._move(served)

    def _commit(self, steps: Sequence[Stored]) -> None:
        result = self._catalogue.commit(step.item for step in steps)
        refused = {item.name for item, _ in result.refused}
        missing = []
        for step in steps:
            if step.item.name in refused:
                self._discard(step.served, step.item)
                step.served.updates.append(Refused(step.item.planned.object_id))
                continue
            self._room.commit(step.item.num_bytes)
            step.served.holds.release(step.item.planned.parents)
            step.served.updates.append(Committed(step.item.planned.object_id))
            if not self._is_there(step.item):
                missing.append(step.item.name)
        if missing:  # another process removed the object that had the name before, and with it our files
            self._remover.remove(missing)

    def _is_there(self, item: StoredObject) -> bool:
        """Whether the files still are."""
        try:
            for path in self._remover.paths_of(item.name, item.world_size):
                self._device.lstat(path)
        except FileNotFoundError:
            return False
        except OSError:  # it says nothing of the file
            return True
        return True

    def _discard(self, served: ServedNamespace, item: StoredObject) -> None:
        """Another process may have stored the same object: then the files are its own."""
        if not self._catalogue.find([item.name]):
            self._remover.unlink_all(self._remover.paths_of(item.name, item.world_size))
        self._room.release(item.num_bytes)
        served.holds.release(item.planned.parents)


def _leading_stores(steps: deque[Step]) -> list[Stored]:
    found = []
    for place in range(min(len(steps), BATCH_ROWS)):
        step = steps[place]
        if not isinstance(step, Stored):
            break
        found.append(step)
    return found
