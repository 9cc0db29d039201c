# SPDX-License-Identifier: Apache-2.0
"""What goes when there is no room: leaves of all namespaces, in one order for everybody.

First what nobody serves, and of that first what nobody will serve again. Then the lowest ``place``: a member's score of
the object while it holds, else its last use. Both are in seconds since the epoch, so they can be compared. What loses
its last child and has no score of its own takes over the child's.
"""

import heapq
import sqlite3
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespaces
from vllm_overlay.tiers.disk.catalogue.rows import (
    MAX_PARENTS,
    MAX_SCORE,
    Id,
    Key,
    Name,
    NumBytes,
    ObjectBytes,
    RemovedObject,
    Score,
    Tag,
    WorldSize,
    read_all,
)

_COLUMNS = "id, namespace, place, tag, key, world_size, num_bytes, num_children, score"
_MAX_PLACE = max(MAX_SCORE, 2.0**40)


class _Leaf(msgspec.Struct, array_like=True, frozen=True, gc=False):
    id: Id
    namespace: Id
    place: Annotated[float, Meta(ge=-_MAX_PLACE, le=_MAX_PLACE)]
    tag: Tag
    key: Key
    world_size: WorldSize
    num_bytes: ObjectBytes
    num_children: NumBytes
    score: Score | None


_Order = tuple[int, float, int]


@dataclass(frozen=True, slots=True)
class Victims:
    """Objects in the order in which they may go, and the numbers of their rows."""

    objects: list[RemovedObject]
    numbers: list[int]

    def that(self, may_go: Callable[[list[Name]], Set[Name]] | None) -> list[int]:
        """The numbers of those that may go."""
        if may_go is None:
            return self.numbers
        allowed = may_go([item.name for item in self.objects])
        return [number for item, number in zip(self.objects, self.numbers, strict=True) if item.name in allowed]


@dataclass(frozen=True, slots=True)
class Limits:
    """Stop after ``num_bytes`` or ``num_objects``; take none of ``pinned``."""

    num_bytes: int
    num_objects: int
    pinned: Set[Name] = frozenset()


class Choice:
    """Chooses, in one transaction, and changes nothing."""

    def __init__(self, db: sqlite3.Connection, served: Set[int], limits: Limits) -> None:
        """``served`` are the namespaces that living members serve."""
        self._db = db
        self._limits = limits
        self._namespaces = Namespaces(db)
        self._served = served
        self._children_left: dict[int, int] = {}

    def run(self) -> Victims:
        victims = Victims([], [])
        num_bytes = 0
        heap = [(self._order(leaf), leaf) for leaf in self._first_leaves()]
        heapq.heapify(heap)
        while heap and num_bytes < self._limits.num_bytes and len(victims.numbers) < self._limits.num_objects:
            _, leaf = heapq.heappop(heap)
            victims.objects.append(RemovedObject(self._name(leaf), leaf.world_size, leaf.num_bytes))
            victims.numbers.append(leaf.id)
            num_bytes += leaf.num_bytes
            for parent in self._new_leaves(leaf):
                heapq.heappush(heap, (self._order(parent), parent))
        return victims

    def _first_leaves(self) -> list[_Leaf]:
        """As many as may be needed: a leaf that is not among the first of all is not chosen before these are."""
        streams = [self._leaves_of(number) for number in self._namespaces.by_id]
        leaves = heapq.merge(*streams, key=self._order)
        return [leaf for leaf, _ in zip(leaves, range(self._limits.num_objects), strict=False)]

    def _leaves_of(self, namespace: int) -> Iterator[_Leaf]:
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM object INDEXED BY object_leaf WHERE namespace = ? AND num_children = 0"
            " ORDER BY place, id",
            (namespace,),
        )
        while chunk := rows.fetchmany(32):
            yield from (leaf for leaf in read_all(_Leaf, chunk) if self._name(leaf) not in self._limits.pinned)

    def _new_leaves(self, gone: _Leaf) -> list[_Leaf]:
        """Parents that have no other child left."""
        found = []
        for parent in self._parents(gone):
            left = self._children_left.get(parent.id, parent.num_children) - 1
            self._children_left[parent.id] = left
            if not left and self._name(parent) not in self._limits.pinned:
                found.append(_taking_over(parent, gone))
        return found

    def _parents(self, leaf: _Leaf) -> list[_Leaf]:
        """Raises msgspec.ValidationError where one is not there."""
        columns = ", ".join(f"object.{column}" for column in _COLUMNS.split(", "))
        rows = self._db.execute(
            f"SELECT {columns} FROM parent LEFT JOIN object ON object.id = parent.parent WHERE child = ? LIMIT ?",
            (leaf.id, MAX_PARENTS),
        )
        return read_all(_Leaf, rows)

    def _order(self, leaf: _Leaf) -> _Order:
        return self._rank(leaf.namespace), leaf.place, leaf.id

    def _rank(self, namespace: int) -> int:
        if namespace in self._served:
            return 2
        row = self._namespaces.by_id.get(namespace)
        return 0 if row is not None and row.is_temporary else 1

    def _name(self, leaf: _Leaf) -> Name:
        return Name(self._namespaces.fingerprint_of(leaf.namespace), ObjectId(leaf.tag, leaf.key))


def _taking_over(parent: _Leaf, gone: _Leaf) -> _Leaf:
    """A parent as ``recency.pass_on`` will leave it."""
    if gone.score is None or parent.score is not None:
        return parent
    return msgspec.structs.replace(parent, place=gone.score, score=gone.score)
