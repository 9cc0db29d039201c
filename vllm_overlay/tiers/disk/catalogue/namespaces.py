# SPDX-License-Identifier: Apache-2.0
"""The rows of namespaces, and the numbers that stand for them in other rows."""

import sqlite3
from collections.abc import Iterable, Set
from dataclasses import dataclass

import msgspec

from vllm_overlay.tiers.disk.catalogue.errors import Damaged
from vllm_overlay.tiers.disk.catalogue.rows import Fingerprint, Flag, Id, Namespace, Seconds, read_all

MAX_NAMESPACES = 10_000
_SELECT = "SELECT id, fingerprint, partner, is_temporary, served_at FROM namespace LIMIT ?"


class NamespaceRow(msgspec.Struct, array_like=True, frozen=True):
    """``partner`` is None where the namespace is its own partner."""

    id: Id
    fingerprint: Fingerprint
    partner: Id | None
    is_temporary: Flag
    served_at: Seconds

    @property
    def parents_id(self) -> int:
        """The namespace in which the parents of its objects lie."""
        return self.id if self.partner is None else self.partner


@dataclass(frozen=True, slots=True)
class KnownNamespace:
    """``is_served``: a living member serves it. ``is_empty``: it has no object and no file to unlink."""

    fingerprint: str
    partner: str
    is_temporary: bool
    is_served: bool
    is_empty: bool


class Namespaces:
    """All namespaces, as one transaction sees them."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        rows = read_all(NamespaceRow, db.execute(_SELECT, (MAX_NAMESPACES + 1,)))
        if len(rows) > MAX_NAMESPACES:
            raise Damaged(f"it has more than {MAX_NAMESPACES} namespaces")
        self.by_id = {row.id: row for row in rows}
        self.by_fingerprint = {row.fingerprint: row for row in rows}
        if any(row.parents_id not in self.by_id for row in rows):
            raise Damaged("a namespace has no partner")

    def get(self, fingerprint: str) -> NamespaceRow | None:
        return self.by_fingerprint.get(fingerprint)

    def fingerprint_of(self, namespace_id: int) -> str:
        """Raises Damaged for a number that stands for none."""
        if (row := self.by_id.get(namespace_id)) is None:
            raise Damaged(f"there is no namespace {namespace_id}")
        return row.fingerprint

    def ids_with_partners(self, fingerprints: Iterable[str]) -> set[int]:
        """The namespaces of these fingerprints that are there, and where their objects' parents lie."""
        rows = [row for fingerprint in fingerprints if (row := self.get(fingerprint)) is not None]
        return {row.id for row in rows} | {row.parents_id for row in rows}

    def serve(self, served: Namespace, now: int) -> NamespaceRow:
        """The row of a namespace that a process begins to serve. Raises Damaged if the file says that it is another."""
        partner = self._add(served.partner, None, served.is_temporary, now)
        row = partner
        if served.fingerprint != served.partner:
            row = self._add(served.fingerprint, partner.id, served.is_temporary, now)
        if row.parents_id != partner.id:
            raise Damaged(f"the parents of namespace {served.fingerprint} are in another one than {served.partner}")
        self._db.execute("UPDATE namespace SET served_at = ? WHERE id IN (?, ?)", (now, row.id, partner.id))
        return row

    def _add(self, fingerprint: str, partner: int | None, is_temporary: bool, now: int) -> NamespaceRow:
        if (row := self.get(fingerprint)) is not None:
            return row
        cursor = self._db.execute(
            "INSERT INTO namespace (fingerprint, partner, is_temporary, served_at) VALUES (?, ?, ?, ?)",
            (fingerprint, partner, is_temporary, now),
        )
        row = NamespaceRow(cursor.lastrowid or 0, fingerprint, partner, int(is_temporary), now)
        self.by_id[row.id] = self.by_fingerprint[fingerprint] = row
        return row


def known(db: sqlite3.Connection, served: Set[int]) -> list[KnownNamespace]:
    """All of them. ``served`` are those that living members serve."""
    namespaces = Namespaces(db)
    return [
        KnownNamespace(
            row.fingerprint,
            namespaces.fingerprint_of(row.parents_id),
            bool(row.is_temporary),
            row.id in served,
            not _has_anything(db, row.id),
        )
        for row in namespaces.by_id.values()
    ]


def add(db: sqlite3.Connection, found: Iterable[Namespace], now: int) -> None:
    """Make rows of namespaces, as if each had been served at ``now``."""
    namespaces = Namespaces(db)
    for namespace in found:
        namespaces.serve(namespace, now)


def drop_empty(db: sqlite3.Connection, keep: set[int]) -> list[str]:
    """Forget namespaces with no object and no file to unlink, but for ``keep`` and their partners."""
    namespaces = Namespaces(db)
    kept = {namespaces.by_id[number].parents_id for number in keep if number in namespaces.by_id} | keep
    empty = [row for row in namespaces.by_id.values() if row.id not in kept and not _has_anything(db, row.id)]
    dropped = {row.id for row in empty}
    for row in namespaces.by_id.values():
        if row.id not in dropped:
            dropped.discard(row.parents_id)
    for number in dropped:
        db.execute("DELETE FROM namespace WHERE id = ?", (number,))
    return [row.fingerprint for row in empty if row.id in dropped]


def _has_anything(db: sqlite3.Connection, number: int) -> bool:
    return any(
        db.execute(f"SELECT 1 FROM {table} WHERE namespace = ? LIMIT 1", (number,)).fetchone()
        for table in ("object", "removal")
    )
