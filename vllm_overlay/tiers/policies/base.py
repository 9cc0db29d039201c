# SPDX-License-Identifier: Apache-2.0
"""What an eviction policy is asked. The index offers only objects that may go; the policy orders them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId

T = TypeVar("T")


class Ranked(msgspec.Struct, frozen=True, gc=False):
    """An object and what goes with it, and what keeping them is worth, in a unit of the policy's own.

    ``used_at``: when they were used last, in seconds of the policy's clock; None: nobody can use them any more. The
    policy knows of no use after ``until``.
    """

    object_id: ObjectId
    value: float
    used_at: float | None
    until: float
    others: tuple[ObjectId, ...] = ()


class EvictionPolicy(ABC, Generic[T]):
    """Orders the objects that may be evicted now: committed, unpinned, with nothing depending on them.

    Called by the index, which adds an object when it becomes evictable and discards it when it no longer is,
    so that leaves always go before what they hang on. Beside that it tells what happens to all objects: ``stored``,
    ``used`` and ``removed``. An order that needs none of these leaves them as they are.
    """

    def serve(self, geometry: Geometry) -> None:
        """Which model's objects will come. Called once, before anything is stored, by who makes the policy."""

    def stored(self, items: Sequence[T]) -> None:
        """These are visible from now on, each after what it hangs on. Called before they are added."""

    def used(self, items: Sequence[T]) -> None:
        """One request goes on from these visible objects now: loaded from here, or marked (``PrefixIndex.touch``)."""

    def removed(self, items: Sequence[T]) -> None:
        """These were visible, and are gone: one object, or what ``Entry.unit`` says of one unit, each after what hung
        on it. Called after they are discarded."""

    @abstractmethod
    def add(self, item: T, last_use: int, end_tokens: int) -> None:
        """``item`` may be evicted from now on; again with a new ``last_use`` when it was used meanwhile."""

    @abstractmethod
    def discard(self, item: T) -> None:
        """``item`` may no longer be evicted. Does nothing when it was not added."""

    @abstractmethod
    def pop(self) -> T | None:
        """Takes out the item to evict first, None when there is none."""

    def ranking(self) -> Iterator[Ranked]:
        """What may go, in any order. Called by a tier whose objects somebody else evicts, which is told the order.

        Other methods may be called between two items. Nothing: the policy has no opinion.
        """
        return iter(())


class NeverEvicts(EvictionPolicy[T]):
    """Lets nothing go, and remembers nothing."""

    def add(self, item: T, last_use: int, end_tokens: int) -> None:
        pass

    def discard(self, item: T) -> None:
        pass

    def pop(self) -> T | None:
        return None
