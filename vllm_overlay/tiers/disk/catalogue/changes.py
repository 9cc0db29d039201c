# SPDX-License-Identifier: Apache-2.0
"""What came and went, numbered, for processes that keep an index of their own. Old changes are trimmed."""

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import lookup
from vllm_overlay.tiers.disk.catalogue.errors import FellBehind
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespaces
from vllm_overlay.tiers.disk.catalogue.rows import (
    COLUMNS,
    MAX_ID,
    Flag,
    Id,
    Key,
    Name,
    ObjectRow,
    StoredObject,
    Tag,
    read_all,
    read_value,
)

MAX_KEPT = 65_536
_READ_ROWS = 1024
_Sequence = Annotated[int, Meta(ge=0, le=MAX_ID)]


@dataclass(frozen=True, slots=True)
class Changes:
    """In order: an object that came, or the name of one that went. ``seq`` is where to go on; ``has_more`` when to."""

    changes: list[StoredObject | Name]
    seq: int
    has_more: bool


def log(db: sqlite3.Connection, namespace: int, is_added: bool, number: int, object_id: ObjectId) -> None:
    """Write one change. Readers find the object's fields by its number, or a later removal."""
    db.execute(
        "INSERT INTO change (namespace, is_added, object, tag, key) VALUES (?, ?, ?, ?, ?)",
        (namespace, is_added, number, object_id.tag, object_id.key),
    )


def trim(db: sqlite3.Connection) -> None:
    """Called at the end of each transaction that wrote changes."""
    db.execute("DELETE FROM change WHERE seq <= ?", (last_seq(db) - MAX_KEPT,))


def last_seq(db: sqlite3.Connection) -> int:
    """The number of the last change; 0 before the first."""
    row = db.execute("SELECT coalesce(max(seq), 0) FROM change").fetchone()
    return int(read_value(_Sequence, row))


def read(db: sqlite3.Connection, seq: int, fingerprints: Iterable[str]) -> Changes:
    """What changed after ``seq`` in these namespaces and their partners, whoever did it. Raises FellBehind."""
    first, last = _bounds(db)
    if not first - 1 <= seq <= last:
        raise FellBehind(f"the catalogue keeps changes {first} to {last}, not all after {seq}")
    end = min(last, seq + _READ_ROWS)
    namespaces = Namespaces(db)
    wanted = namespaces.ids_with_partners(fingerprints)
    found: list[StoredObject | Name] = []
    for namespace, is_added, number, tag, key in _select(db, seq, end):
        if namespace not in wanted:
            continue
        if not is_added:
            found.append(Name(namespaces.fingerprint_of(namespace), ObjectId(tag, key)))
        else:
            found += _find(db, namespaces, number)
    return Changes(found, end, end < last)


def _bounds(db: sqlite3.Connection) -> tuple[int, int]:
    """The first and the last number that are kept; 1 and 0 before the first change."""
    last = last_seq(db)
    row = db.execute("SELECT coalesce(min(seq), 1) FROM change").fetchone()
    return int(read_value(_Sequence, row)), last


def _select(db: sqlite3.Connection, seq: int, end: int) -> list[Any]:
    rows = db.execute(
        "SELECT namespace, is_added, object, tag, key FROM change WHERE seq > ? AND seq <= ? ORDER BY seq",
        (seq, end),
    )
    return read_all(tuple[Id, Flag, Id, Tag, Key], rows)


def _find(db: sqlite3.Connection, namespaces: Namespaces, number: int) -> list[StoredObject]:
    """The object, unless it has gone since: then a later change says so."""
    rows = db.execute(f"SELECT {COLUMNS} FROM object WHERE id = ?", (number,)).fetchall()
    return [lookup.with_parents(db, namespaces, row) for row in read_all(ObjectRow, rows)]
