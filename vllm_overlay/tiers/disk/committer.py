# SPDX-License-Identifier: Apache-2.0
"""Carries out, in order, what the scheduler has decided about objects: stored, discarded, removed."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import BATCH_ROWS, Catalogue, Name, StoredObject
from vllm_overlay.tiers.disk.catalogue.room import Room
from vllm_overlay.tiers.disk.maintenance.remover import Remover
from vllm_overlay.tiers.disk.updates import Committed, Forgotten, Refused, ServedNamespace


@dataclass(frozen=True, slots=True)
class Stored:
    """All ranks' files of an object are in place. Its parents are held, and its bytes taken from the room."""

    served: ServedNamespace
    item: StoredObject


@dataclass(frozen=True, slots=True)
class Discarded:
    """A store has failed, or nobody wants its object. The files that it left, if any, are of no use.

    ``is_refused`` says that the catalogue did not take the object, while the scheduler thinks that it is there.
    """

    served: ServedNamespace
    item: StoredObject
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """Another process removed the object that had the name before, and with it our files."""

    name: Name


@dataclass(frozen=True, slots=True)
class Dropped:
    """Nobody shall load this object any more, nor what depends on it."""

    served: ServedNamespace
    object_id: ObjectId


@dataclass(frozen=True, slots=True)
class Moved:
    """From here on another namespace is served."""

    served: ServedNamespace


_log = RateLimitedLog(logging.getLogger(__name__))
Step = Stored | Discarded | Lost | Dropped | Moved


class Committer:
    """Called in the bookkeeper's thread. Raises CatalogueError. The steps that are left are then tried again."""

    def __init__(
        self,
        catalogue: Catalogue,
        remover: Remover,
        room: Room,
        stuck: list[Discarded],
        removed: list[Dropped],
        move: Callable[[ServedNamespace], None],
    ) -> None:
        """``stuck`` has what could not be unlinked, ``removed`` what ``forget`` is yet to tell of. The caller owns both
        for as long as it keeps ``room``."""
        self._catalogue = catalogue
        self._remover = remover
        self._room = room
        self._stuck = stuck
        self._removed = removed
        self._move = move

    def carry_out(self, steps: deque[Step]) -> None:
        """Take away what is done, each step once. Another thread may append meanwhile."""
        for step in tuple(self._stuck):
            if self._discard(step):
                self._stuck.remove(step)
        while steps:
            if stored := _leading_stores(steps):
                self._commit(stored, steps)
            else:
                self._carry_out(steps[0])
                steps.popleft()

    def forget(self) -> None:
        """What was removed may be stored again, now that the scheduler is told of all changes: it would take an older
        one for the removal of what it has stored since."""
        while self._removed:
            step = self._removed.pop()
            step.served.updates.append(Forgotten(step.object_id))

    def _carry_out(self, step: Step) -> None:
        match step:
            case Discarded():
                if not self._discard(step):
                    self._stuck.append(step)
            case Lost(name):
                self._remover.remove([name])
            case Dropped(served, object_id):
                self._remover.remove([Name(served.namespace.fingerprint_of(object_id.tag), object_id)])
                self._removed.append(step)
            case Moved(served):
                self._move(served)
            case Stored():
                raise AssertionError("stores are committed together")

    def _commit(self, stored: Sequence[Stored], steps: deque[Step]) -> None:
        """Once the catalogue has answered, these steps are done. What is left to do becomes new steps."""
        refused = self._refused(stored)
        left: list[Step] = []
        for step in stored:
            steps.popleft()
            if step.item.name in refused:
                left.append(Discarded(step.served, step.item, is_refused=True))
                continue
            self._room.commit(step.item.num_bytes)
            step.served.holds.release(step.item.planned.parents)
            step.served.updates.append(Committed(step.item.planned.object_id))
            if not self._remover.is_there(step.item):
                left.append(Lost(step.item.name))
        steps.extendleft(reversed(left))

    def _refused(self, stored: Sequence[Stored]) -> set[Name]:
        try:
            return {item.name for item, _ in self._catalogue.commit(step.item for step in stored).refused}
        except ValueError as error:  # an object that no row can hold must not keep the others
            if len(stored) > 1:
                return set().union(*(self._refused([step]) for step in stored))
            _log.warning("row", "disk tier: an object cannot be kept: %s", error)
            return {stored[0].item.name}

    def _discard(self, step: Discarded) -> bool:
        """Whether its files are gone, or belong to another process that has stored the same object. If not, its bytes
        stay taken."""
        item = step.item
        is_others = bool(self._catalogue.find([item.name]))
        if not is_others and not self._remover.unlink_all(self._remover.paths_of(item.name, item.world_size)):
            return False
        object_id = item.planned.object_id
        self._room.release(item.num_bytes)
        step.served.holds.release(item.planned.parents)
        step.served.updates.append(Refused(object_id) if step.is_refused else Forgotten(object_id))
        return True


def _leading_stores(steps: deque[Step]) -> list[Stored]:
    found = []
    for place in range(min(len(steps), BATCH_ROWS)):
        step = steps[place]
        if not isinstance(step, Stored):
            break
        found.append(step)
    return found
