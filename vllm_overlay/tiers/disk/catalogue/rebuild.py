# SPDX-License-Identifier: Apache-2.0
"""A new catalogue learns from one member what files there are; until then nobody is granted anything."""

import sqlite3

from vllm_overlay.tiers.disk.catalogue.members import is_alive
from vllm_overlay.tiers.disk.catalogue.totals import read_meta


def begin(db: sqlite3.Connection, root: str, slot: int) -> bool:
    """Whether this member shall do it: not when it is done, nor while another living one does. Raises OSError."""
    meta = read_meta(db)
    if meta.is_complete or (meta.rebuilder not in (None, slot) and is_alive(root, meta.rebuilder)):
        return False
    db.execute("UPDATE meta SET rebuilder = ? WHERE id = 1", (slot,))
    return True


def check_rebuilder(db: sqlite3.Connection, slot: int) -> None:
    """Raise ValueError unless this member has begun a rebuild."""
    meta = read_meta(db)
    if meta.is_complete or meta.rebuilder != slot:
        raise ValueError("call begin_rebuild first")


def end(db: sqlite3.Connection, slot: int) -> None:
    """Everything has been adopted. Raises ValueError as ``check_rebuilder`` does."""
    check_rebuilder(db, slot)
    db.execute("UPDATE meta SET is_complete = 1, rebuilder = NULL WHERE id = 1")
