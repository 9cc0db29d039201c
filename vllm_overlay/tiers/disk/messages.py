# SPDX-License-Identifier: Apache-2.0
"""What the bookkeeper's and the scheduler's threads tell each other, each in the order in which it happened."""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue import File, StoredObject
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.holds import Holds

# To the scheduler.


@dataclass(frozen=True, slots=True)
class Found:
    """Objects in the catalogue, each after its parents, and their files in the same order. ``num_bytes`` of each is of
    all ranks."""

    objects: list[PlannedObject]
    files: list[File]


@dataclass(frozen=True, slots=True)
class Gone:
    """An object that was evicted, by whatever process, and the file that went with it."""

    object_id: ObjectId
    file: File


@dataclass(frozen=True, slots=True)
class Committed:
    """The catalogue has the object of a store. ``file`` is the store's, ``counts`` the one that the object has now:
    another where somebody else was first, none where the object was not taken."""

    object_id: ObjectId
    file: File
    counts: File | None


@dataclass(frozen=True, slots=True)
class ReloadBegins:
    """All there is follows as ``Found``."""


@dataclass(frozen=True, slots=True)
class ReloadEnds:
    """What was not found since ``ReloadBegins`` is not there any more."""


Update = Found | Gone | Committed | ReloadBegins | ReloadEnds


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


class Stored(msgspec.Struct, frozen=True, gc=False):
    """All ranks' files of an object are in place. The files of its ``parents`` are held, and its bytes taken from the
    room."""

    served: ServedNamespace
    item: StoredObject
    parents: tuple[File, ...]
    replaces: File | None = None


class Discarded(msgspec.Struct, frozen=True, gc=False):
    """A store has failed, or nobody wants its object. What it left is to be unlinked, unless something names it."""

    served: ServedNamespace
    file: File
    world_size: int
    num_bytes: int
    parents: tuple[File, ...]


class Moved(msgspec.Struct, frozen=True, gc=False):
    """From here on another namespace is served."""

    served: ServedNamespace


Step = Stored | Discarded | Moved


def discarded(step: Stored) -> Discarded:
    """The step for a store that the catalogue did not take."""
    return Discarded(step.served, step.item.file, step.item.world_size, step.item.num_bytes, step.parents)
