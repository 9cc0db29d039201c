# SPDX-License-Identifier: Apache-2.0
"""What the bookkeeper's and the scheduler's threads tell each other, each in the order in which it happened; and what
tickets say of files."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue import File, Gone
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.room import Holds

# To the scheduler.


@dataclass(frozen=True, slots=True)
class Found:
    """Objects in the catalogue, each after its parents, and their files in the same order. ``num_bytes`` of each is of
    all ranks."""

    objects: Sequence[PlannedObject]
    files: Sequence[File]


@dataclass(frozen=True, slots=True)
class Committed:
    """The catalogue has the object of a store. ``file`` is the store's, ``counts`` the one that the object has now:
    another where somebody else was first, none where the object was not taken."""

    object_id: ObjectId
    file: File
    counts: File | None


class Reload(Enum):
    """All there is comes as ``Found`` between the two. What does not is not there any more."""

    BEGINS = 1
    ENDS = 2


Update = Found | Gone | Committed | Reload


@dataclass(slots=True, eq=False)
class ServedNamespace:
    """One namespace, from the engine's start or last reset to its next reset.

    The bookkeeper's thread appends to ``updates``, the scheduler's takes from it. What comes for a namespace that is
    not served any more is never looked at.
    """

    namespace: DiskNamespace
    holds: Holds = field(default_factory=Holds)
    updates: deque[Update] = field(default_factory=deque)
    is_loaded: bool = False
    """Whether ``updates`` had all objects once. Set by the bookkeeper's thread."""
    is_complete: bool = False
    """The same, of a catalogue that knew all files. Set by the bookkeeper's thread."""


# To the bookkeeper.


class Store(msgspec.Struct, eq=False, gc=False):
    """An object from its ticket until the catalogue has it or its files are gone. ``num_bytes`` are of all ranks'
    files, taken from the room.

    ``parents`` are the files that are held meanwhile. ``replaces``: the index has the object in that file, pinned and
    hidden, because it was not right or could not be read. ``is_written``: every rank has reported it, and a parent is
    still on its way. The bookkeeper gets it ``is_wanted`` when all files are in place; else what it left is to be
    unlinked, unless something names it.
    """

    served: ServedNamespace
    planned: PlannedObject
    file: File
    num_bytes: int
    parents: tuple[File, ...]
    replaces: File | None
    is_written: bool = False
    is_wanted: bool = True


Step = Store | ServedNamespace
"""A store that has ended, or what is served from here on."""

# In tickets.

_BITS = 40
"""Of a file's number. The rest of a ticket stands for its writer."""


class DiskPart(msgspec.Struct, frozen=True, gc=False):
    """What the manager tells its workers beside the object: the file of a store or a load, and its namespace."""

    file: File
    fingerprint: str
    is_private: bool = False


class FileTickets:
    """A ticket for each file, the same one each time: above zero for what this engine has stored, and for nothing else.

    Called from the scheduler's thread.
    """

    def __init__(self) -> None:
        self._own: set[str] = set()
        self._writers: list[str] = []
        self._places: dict[str, int] = {}

    def of_store(self, file: File) -> int:
        """The ticket of a file that this engine, whose writer nobody else is, begins to store."""
        self._own.add(file.writer)
        return self.ticket(file)

    def ticket(self, file: File) -> int:
        place = self._places.get(file.writer)
        if place is None:
            place = self._places[file.writer] = len(self._writers)
            self._writers.append(file.writer)
        ticket = place << _BITS | file.number
        return ticket if file.writer in self._own else -ticket

    def file(self, ticket: int) -> File:
        ticket = abs(ticket)
        return File(self._writers[ticket >> _BITS], ticket & ((1 << _BITS) - 1))
