# SPDX-License-Identifier: Apache-2.0
"""What a catalogue keeps to itself. Only here do its tests read or set it."""

import contextlib
import sqlite3
from collections.abc import Collection

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import Catalogue, File, StoredObject
from vllm_overlay.tiers.disk.catalogue.connection import LONG_CALLS
from vllm_overlay.tiers.disk.catalogue.rows import name_of


def reading(catalogue: Catalogue) -> contextlib.AbstractContextManager[sqlite3.Connection]:
    """A transaction that may read every row."""
    return catalogue.reading(LONG_CALLS)


def writing(catalogue: Catalogue) -> contextlib.AbstractContextManager[sqlite3.Connection]:
    """A transaction in which a test does what no call does."""
    return catalogue.writing()


def find(catalogue: Catalogue, fingerprint: str, object_ids: Collection[ObjectId]) -> list[StoredObject]:
    """Those of these objects that are there."""
    return [item for part in catalogue.load(fingerprint)[1] for item in part if item.object_id in object_ids]


def granted(catalogue: Catalogue) -> dict[str, tuple[str | None, int]]:
    """What each writer serves, nothing if it has ended, and the bytes that it was granted."""
    with reading(catalogue) as db:
        found = db.execute(
            "SELECT writer.id, fingerprint, granted FROM writer LEFT JOIN namespace ON namespace.id = writer.namespace"
        ).fetchall()
    return {name_of(writer): (fingerprint, num_bytes) for writer, fingerprint, num_bytes in found}


def collectors(catalogue: Catalogue) -> dict[File, str | None]:
    """Who unlinks each file that is garbage."""
    with reading(catalogue) as db:
        found = db.execute("SELECT writer, number, collector FROM garbage").fetchall()
    return {File(name_of(writer), number): None if of is None else name_of(of) for writer, number, of in found}
