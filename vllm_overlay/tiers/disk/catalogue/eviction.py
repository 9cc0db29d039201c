# SPDX-License-Identifier: Apache-2.0
"""What goes when there is no room: leaves of all namespaces, in one order for everybody.

First what nobody serves, and of that first what is private, one namespace after another: nobody will serve it again.
Then the lowest ``place``: a writer's score of the object while it holds, else its last use. Both are in seconds since
the epoch, so they can be compared. What loses its last child and has no score of its own takes over the child's.
"""

import contextlib
import heapq
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import feed, rows
from vllm_overlay.tiers.disk.catalogue.connection import Connection
from vllm_overlay.tiers.disk.catalogue.errors import Busy, Unavailable
from vllm_overlay.tiers.disk.catalogue.namespaces import find_namespace, served
from vllm_overlay.tiers.disk.catalogue.objects import BY_NAME
from vllm_overlay.tiers.disk.catalogue.rows import BATCH_ROWS, MAX_SCORE, File, Garbage, Score, batches, check_value
from vllm_overlay.tiers.disk.catalogue.writers import act_as, read_grant

_MAX_PLACE = max(MAX_SCORE, 2.0**40)


class _Leaf(msgspec.Struct, array_like=True, frozen=True, gc=False):
    id: rows.Id
    namespace: rows.Id
    place: Annotated[float, Meta(ge=-_MAX_PLACE, le=_MAX_PLACE)]
    writer: rows.WriterId
    number: rows.Number
    world_size: rows.WorldSize
    num_bytes: rows.ObjectBytes
    num_children: rows.NumBytes
    score: Score | None

    @property
    def file(self) -> File:
        return File(rows.name_of(self.writer), self.number)

    @property
    def victim(self) -> Garbage:
        return Garbage(self.file, self.world_size, self.num_bytes)


_COLUMNS = ", ".join(f"object.{column}" for column in _Leaf.__struct_fields__)
_IS_LEFT = "is_private AND id NOT IN (SELECT namespace FROM writer WHERE namespace IS NOT NULL)"
_LEFT = (
    f"SELECT id FROM namespace WHERE {_IS_LEFT} AND EXISTS (SELECT 1 FROM object INDEXED BY object_leaf"
    " WHERE object.namespace = namespace.id AND num_children = 0) ORDER BY id"
)
_NOT_LEFT = f"SELECT id FROM namespace WHERE NOT ({_IS_LEFT}) LIMIT 10000"
"""No root has as many, but a forged one."""


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


class Eviction(Connection):
    """See ``Catalogue``."""

    def touch(self, fingerprint: str, object_ids: Iterable[ObjectId], now: int) -> None:
        """These objects were used: a score of before is ``now`` too. What is not there is passed over."""
        check_value(rows.Seconds, now)
        for part in batches(object_ids):
            with self.writing() as db:
                if (namespace := find_namespace(db, fingerprint)) is not None:
                    db.executemany(
                        "UPDATE object SET last_use = ?, score = CASE WHEN score IS NULL THEN NULL ELSE ? END"
                        f" WHERE {BY_NAME}",
                        ((now, now, namespace, each.key, each.tag) for each in part),
                    )
                    db.execute("UPDATE meta SET newest_use = ?1 WHERE newest_use < ?1", (now,))

    def publish_scores(self, fingerprint: str, scored: Iterable[Scored], expires_at: int) -> None:
        """Until ``expires_at`` evict these objects as if they had last been used at the time that the score says.

        An object that was used after its ``until`` is passed over. What loses its last child and has no score takes
        over the child's: so what hangs on nothing else goes with it.
        """
        check_value(rows.Seconds, expires_at)
        for part in batches(scored):
            check_value(list[Score], [value for item in part for value in (item.score, item.until)])
            with self.writing() as db:
                if (namespace := find_namespace(db, fingerprint)) is not None:
                    db.executemany(
                        f"UPDATE object SET score = ?, score_expiry = ? WHERE {BY_NAME} AND last_use <= ?",
                        (
                            (item.score, expires_at, namespace, item.object_id.key, item.object_id.tag, item.until)
                            for item in part
                        ),
                    )

    def choose_victims(self, limits: Limits, now: int) -> list[Garbage]:
        """What ``evict`` would take out, also while nothing can be written. Changes nothing that anybody can see."""
        with contextlib.suppress(Busy, Unavailable):
            self._expire_scores(now)
        with self.reading() as db:
            return [leaf.victim for leaf in _Choice(db, limits).run()]

    def evict(
        self, writer: str, limits: Limits, now: int, may_go: Callable[[list[File]], Set[File]] = frozenset
    ) -> list[Garbage]:
        """Take out at most 256 objects, those that are worth the least over all namespaces, leaves first.

        One transaction chooses and takes out, so no two processes choose the same. ``may_go`` is told what was chosen,
        and says what of it may go; it must not wait. What may not go keeps its parents too. The caller unlinks what is
        returned and calls ``collected`` then.
        """
        number = rows.number_of(writer)
        if limits.num_objects > BATCH_ROWS:
            raise ValueError(f"at most {BATCH_ROWS} objects go at once, not {limits.num_objects}")
        self._expire_scores(now)
        with self.writing() as db:
            read_grant(db, number)
            chosen = _Choice(db, limits).run()
            allowed = may_go([leaf.file for leaf in chosen])
            act_as(db, number)
            delete = "DELETE FROM object WHERE id = ? AND num_children = 0"
            gone = [each.victim for each in chosen if each.file in allowed and db.execute(delete, (each.id,)).rowcount]
            feed.trim(db)
            return gone

    def _expire_scores(self, now: int) -> None:
        check_value(rows.Seconds, now)
        expired = "FROM object WHERE score IS NOT NULL AND score_expiry <= ? LIMIT ?"
        with self.reading() as db:
            has_more = db.execute(f"SELECT 1 {expired}", (now, 1)).fetchone() is not None
        while has_more:
            with self.writing() as db:
                statement = f"UPDATE object SET score = NULL, score_expiry = NULL WHERE id IN (SELECT id {expired})"
                has_more = db.execute(statement, (now, BATCH_ROWS)).rowcount >= BATCH_ROWS


class _Choice:
    """Chooses, in one transaction, and changes nothing."""

    def __init__(self, db: sqlite3.Connection, limits: Limits) -> None:
        self._db, self._limits = db, limits
        self._served = served(db)
        self._children_left: dict[int, int] = {}
        self._chosen: list[_Leaf] = []
        self._num_bytes = 0

    def run(self) -> list[_Leaf]:
        """In the order in which they may go. Namespaces that resets have left are many, and worth as little as each
        other: no more of them are looked at than are needed."""
        for row in self._db.execute(_LEFT):
            if not self._is_short:
                break
            self._choose([rows.read_value(rows.Id, row)])
        if self._is_short:
            self._choose(number for (number,) in rows.read_all(tuple[rows.Id], self._db.execute(_NOT_LEFT)))
        return self._chosen

    @property
    def _is_short(self) -> bool:
        return self._num_bytes < self._limits.num_bytes and len(self._chosen) < self._limits.num_objects

    def _choose(self, namespaces: Iterable[int]) -> None:
        leaves = heapq.merge(*map(self._leaves_of, namespaces), key=self._order)
        first = next(leaves, None)
        new: list[tuple[tuple[bool, float, int], _Leaf]] = []
        while self._is_short and (first or new):
            if first and not (new and new[0][0] < self._order(first)):
                leaf, first = first, next(leaves, None)
            else:
                _, leaf = heapq.heappop(new)
            self._chosen.append(leaf)
            self._num_bytes += leaf.num_bytes
            for parent in self._new_leaves(leaf):
                heapq.heappush(new, (self._order(parent), parent))

    def _leaves_of(self, namespace: int) -> Iterator[_Leaf]:
        found = self._db.execute(
            f"SELECT {_COLUMNS.replace('object.', '')} FROM object INDEXED BY object_leaf"
            " WHERE namespace = ? AND num_children = 0 ORDER BY place, id",
            (namespace,),
        )
        while chunk := found.fetchmany(32):
            yield from (leaf for leaf in rows.read_all(_Leaf, chunk) if leaf.file not in self._limits.pinned)

    def _new_leaves(self, gone: _Leaf) -> list[_Leaf]:
        """Parents that have no other child left, as the trigger ``went`` will leave them. Raises
        msgspec.ValidationError where one is not there."""
        parents = self._db.execute(
            f"SELECT {_COLUMNS} FROM parent LEFT JOIN object ON object.id = parent.parent WHERE child = ? LIMIT ?",
            (gone.id, rows.MAX_PARENTS),
        )
        found = []
        for parent in rows.read_all(_Leaf, parents):
            left = self._children_left.get(parent.id, parent.num_children) - 1
            self._children_left[parent.id] = left
            if not left and parent.file not in self._limits.pinned:
                if gone.score is not None and parent.score is None:
                    parent = msgspec.structs.replace(parent, place=gone.score, score=gone.score)
                found.append(parent)
        return found

    def _order(self, leaf: _Leaf) -> tuple[bool, float, int]:
        return leaf.namespace in self._served, leaf.place, leaf.id
