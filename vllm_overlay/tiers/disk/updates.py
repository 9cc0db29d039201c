# SPDX-License-Identifier: Apache-2.0
"""What the bookkeeper tells the scheduler about the objects of a namespace, in the order in which it happened."""

from collections import deque
from dataclasses import dataclass, field

from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.holds import Holds


@dataclass(frozen=True, slots=True)
class Found:
    """Objects in the catalogue, each after its parents. ``num_bytes`` of each is of all ranks' files."""

    objects: list[PlannedObject]


@dataclass(frozen=True, slots=True)
class Gone:
    """An object that was evicted or removed, by whatever process."""

    object_id: ObjectId


@dataclass(frozen=True, slots=True)
class Committed:
    """The catalogue has the object of a store."""

    object_id: ObjectId


@dataclass(frozen=True, slots=True)
class Refused:
    """The catalogue did not take the object of a store; its files are removed."""

    object_id: ObjectId


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What the scheduler dropped or discarded is removed: the name may be stored again."""

    object_id: ObjectId


@dataclass(frozen=True, slots=True)
class ReloadBegins:
    """All there is follows as ``Found``."""


@dataclass(frozen=True, slots=True)
class ReloadEnds:
    """What was not found since ``ReloadBegins`` is not there any more. ``going`` were evicted before it."""

    going: frozenset[ObjectId]


Update = Found | Gone | Committed | Refused | Forgotten | ReloadBegins | ReloadEnds


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
