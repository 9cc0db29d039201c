# SPDX-License-Identifier: Apache-2.0
"""When objects were used, and what members think that they are worth."""

import sqlite3
from collections.abc import Iterable

from vllm_overlay.tiers.disk.catalogue.lookup import BY_NAME
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespaces
from vllm_overlay.tiers.disk.catalogue.rows import Name, Scored


def touch(db: sqlite3.Connection, names: Iterable[Name], now: int) -> None:
    """Objects were used at ``now``, and a score of before is ``now`` too. Names that are not there are passed over."""
    namespaces = Namespaces(db)
    rows = [
        (now, now, now, namespace.id, name.object_id.key, name.object_id.tag)
        for name in names
        if (namespace := namespaces.get(name.fingerprint)) is not None
    ]
    db.executemany(
        f"UPDATE object SET last_use = ?, place = ?, score = CASE WHEN score IS NULL THEN NULL ELSE ? END"
        f" WHERE {BY_NAME}",
        rows,
    )


def publish_scores(db: sqlite3.Connection, scores: Iterable[Scored], expires_at: int) -> None:
    """Until ``expires_at`` these objects are evicted as if they had last been used at the time that the score says."""
    namespaces = Namespaces(db)
    rows = [
        (item.score, expires_at, item.score, namespace.id, item.name.object_id.key, item.name.object_id.tag, item.until)
        for item in scores
        if (namespace := namespaces.get(item.name.fingerprint)) is not None
    ]
    db.executemany(f"UPDATE object SET score = ?, score_expiry = ?, place = ? WHERE {BY_NAME} AND last_use <= ?", rows)


def pass_on(db: sqlite3.Connection, child: int, score: float, expiry: int | None) -> None:
    """The parents that a child leaves without any, and without a score, have its score."""
    db.execute(
        "UPDATE object SET score = ?, score_expiry = ?, place = ? WHERE num_children = 0 AND score IS NULL"
        " AND id IN (SELECT parent FROM parent WHERE child = ?)",
        (score, expiry, score, child),
    )


def has_expired_scores(db: sqlite3.Connection, now: int) -> bool:
    """Whether ``expire_scores`` has work."""
    found = db.execute("SELECT 1 FROM object WHERE score IS NOT NULL AND score_expiry <= ? LIMIT 1", (now,)).fetchone()
    return found is not None


def expire_scores(db: sqlite3.Connection, now: int, num_rows: int) -> bool:
    """Forget at most ``num_rows`` scores; returns whether it was as many, so that there may be more."""
    cursor = db.execute(
        "UPDATE object SET score = NULL, score_expiry = NULL, place = last_use WHERE id IN"
        " (SELECT id FROM object WHERE score IS NOT NULL AND score_expiry <= ? LIMIT ?)",
        (now, num_rows),
    )
    return cursor.rowcount >= num_rows
