# SPDX-License-Identifier: Apache-2.0
"""When objects were used, and what writers think that they are worth."""

import sqlite3
from collections.abc import Sequence

import msgspec

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue.objects import BY_NAME
from vllm_overlay.tiers.disk.catalogue.writers import find_namespace


class Scored(msgspec.Struct, frozen=True, gc=False):
    """What a writer thinks of an object: evict it as if it had last been used at ``score``.

    The writer knows its uses up to ``until``: of an object that somebody has used later it knows too little.
    """

    object_id: ObjectId
    score: float
    until: float


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
