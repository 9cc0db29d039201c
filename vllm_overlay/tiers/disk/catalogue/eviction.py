# SPDX-License-Identifier: Apache-2.0
"""What goes when there is no room: leaves of all namespaces, in one order for everybody.

First what nobody serves, and of that first what is private: nobody will serve it again. Then the lowest ``place``: a
writer's score of the object while it holds, else its last use. Both are in seconds since the epoch, so they can be
compared. What loses its last child and has no score of its own takes over the child's.
"""

import heapq
import sqlite3
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import feed
from vllm_overlay.tiers.disk.catalogue.namespaces import find_namespace, read_namespaces, served
from vllm_overlay.tiers.disk.catalogue.objects import BY_NAME
from vllm_overlay.tiers.disk.catalogue.rows import (
    MAX_PARENTS,
    MAX_SCORE,
    File,
    Garbage,
    Id,
    Number,
    NumBytes,
    ObjectBytes,
    Score,
    WorldSize,
    WriterId,
    name_of,
    read_all,
)
from vllm_overlay.tiers.disk.catalogue.writers import act_as, read_grant

_COLUMNS = "id, namespace, place, writer, number, world_size, num_bytes, num_children, score"
_MAX_PLACE = max(MAX_SCORE, 2.0**40)


class _Leaf(msgspec.Struct, array_like=True, frozen=True, gc=False):
    id: Id
    namespace: Id
    place: Annotated[float, Meta(ge=-_MAX_PLACE, le=_MAX_PLACE)]
    writer: WriterId
    number: Number
    world_size: WorldSize
    num_bytes: ObjectBytes
    num_children: NumBytes
    score: Score | None

    @property
    def file(self) -> File:
        return File(name_of(self.writer), self.number)

    @property
    def victim(self) -> Garbage:
        return Garbage(self.file, self.world_size, self.num_bytes)

    def taking_over(self, child: "_Leaf") -> "_Leaf":
        """As the trigger ``went`` will leave this one after its last child."""
        if child.score is None or self.score is not None:
            return self
        return msgspec.structs.replace(self, place=child.score, score=child.score)


class Scored(msgspec.Struct, frozen=True, gc=False):
    """What a writer thinks of an object: evict it as if it had last been used at ``score``.

    The writer knows its uses up to ``until``: of an object that somebody has used later it knows too little.
    """

    object_id: ObjectId
    score: float
    until: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Stop after ``num_bytes`` or ``num_objects``; take none of ``pinned``."""

    num_bytes: int
    num_objects: int
    pinned: Set[File] = frozenset()


# What objects are worth.


def touch(db: sqlite3.Connection, fingerprint: str, object_ids: Sequence[ObjectId], now: int) -> None:
    """Objects were used at ``now``, and a score of before is ``now`` too. What is not there is passed over."""
    if (namespace := find_namespace(db, fingerprint)) is None:
        return
    db.executemany(
        f"UPDATE object SET last_use = ?, score = CASE WHEN score IS NULL THEN NULL ELSE ? END WHERE {BY_NAME}",
        ((now, now, namespace, each.key, each.tag) for each in object_ids),
    )
    db.execute("UPDATE meta SET newest_use = ?1 WHERE newest_use < ?1", (now,))


def publish(db: sqlite3.Connection, fingerprint: str, scores: Sequence[Scored], expires_at: int) -> None:
    """Until ``expires_at`` these objects are evicted as if they had last been used at the time that the score says."""
    if (namespace := find_namespace(db, fingerprint)) is None:
        return
    db.executemany(
        f"UPDATE object SET score = ?, score_expiry = ? WHERE {BY_NAME} AND last_use <= ?",
        ((item.score, expires_at, namespace, item.object_id.key, item.object_id.tag, item.until) for item in scores),
    )


def has_expired(db: sqlite3.Connection, now: int) -> bool:
    """Whether ``expire`` has work."""
    found = db.execute("SELECT 1 FROM object WHERE score IS NOT NULL AND score_expiry <= ? LIMIT 1", (now,)).fetchone()
    return found is not None


def expire(db: sqlite3.Connection, now: int, num_rows: int) -> bool:
    """Forget at most ``num_rows`` scores; returns whether it was as many, so that there may be more."""
    cursor = db.execute(
        "UPDATE object SET score = NULL, score_expiry = NULL WHERE id IN"
        " (SELECT id FROM object WHERE score IS NOT NULL AND score_expiry <= ? LIMIT ?)",
        (now, num_rows),
    )
    return cursor.rowcount >= num_rows


# What goes.


def choose(db: sqlite3.Connection, limits: Limits) -> list[Garbage]:
    """What ``evict`` would take out."""
    return [leaf.victim for leaf in _Choice(db, limits).run()]


def evict(
    db: sqlite3.Connection, writer: int, limits: Limits, may_go: Callable[[list[File]], Set[File]] | None
) -> list[Garbage]:
    """Take the rows of leaves out; their files are this writer's to unlink. What of them may not go keeps its parents
    too."""
    read_grant(db, writer)
    chosen = _Choice(db, limits).run()
    allowed = None if may_go is None else may_go([leaf.file for leaf in chosen])
    act_as(db, writer)
    gone = [leaf.victim for leaf in chosen if (allowed is None or leaf.file in allowed) and _delete(db, leaf.id)]
    feed.trim(db)
    return gone


def _delete(db: sqlite3.Connection, number: int) -> bool:
    return db.execute("DELETE FROM object WHERE id = ? AND num_children = 0", (number,)).rowcount > 0


_Order = tuple[int, float, int]


class _Choice:
    """Chooses, in one transaction, and changes nothing."""

    def __init__(self, db: sqlite3.Connection, limits: Limits) -> None:
        self._db = db
        self._limits = limits
        self._namespaces = read_namespaces(db)
        self._served = served(db)
        self._children_left: dict[int, int] = {}

    def run(self) -> list[_Leaf]:
        """In the order in which they may go."""
        chosen: list[_Leaf] = []
        num_bytes = 0
        heap = [(self._order(leaf), leaf) for leaf in self._first_leaves()]
        heapq.heapify(heap)
        while heap and num_bytes < self._limits.num_bytes and len(chosen) < self._limits.num_objects:
            _, leaf = heapq.heappop(heap)
            chosen.append(leaf)
            num_bytes += leaf.num_bytes
            for parent in self._new_leaves(leaf):
                heapq.heappush(heap, (self._order(parent), parent))
        return chosen

    def _first_leaves(self) -> list[_Leaf]:
        """As many as may be needed: a leaf that is not among the first of all is not chosen before these are."""
        streams = [self._leaves_of(number) for number in self._namespaces]
        leaves = heapq.merge(*streams, key=self._order)
        return [leaf for leaf, _ in zip(leaves, range(self._limits.num_objects), strict=False)]

    def _leaves_of(self, namespace: int) -> Iterator[_Leaf]:
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM object INDEXED BY object_leaf WHERE namespace = ? AND num_children = 0"
            " ORDER BY place, id",
            (namespace,),
        )
        while chunk := rows.fetchmany(32):
            yield from (leaf for leaf in read_all(_Leaf, chunk) if leaf.file not in self._limits.pinned)

    def _new_leaves(self, gone: _Leaf) -> list[_Leaf]:
        """Parents that have no other child left."""
        found = []
        for parent in self._parents(gone):
            left = self._children_left.get(parent.id, parent.num_children) - 1
            self._children_left[parent.id] = left
            if not left and parent.file not in self._limits.pinned:
                found.append(parent.taking_over(gone))
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
        row = self._namespaces.get(namespace)
        return 0 if row is not None and row.is_private else 1
