# SPDX-License-Identifier: Apache-2.0
"""Room: what all members may still write.

Objects, grants and files that are being unlinked stay within the capacity together. A grant that nobody uses is room
that nobody has, so all members together may hold a 32nd of the capacity, each its equal part of that.
"""

import sqlite3
from dataclasses import dataclass

from vllm_overlay.tiers.disk.catalogue.members import read_grant, write_grant
from vllm_overlay.tiers.disk.catalogue.totals import Totals, read_totals

HELD_PARTS = 32


@dataclass(frozen=True, slots=True)
class Grant:
    """In bytes. ``num_bytes`` were added to what the member holds.

    ``short_bytes`` more would have been, were there room: evict as many. ``surplus_bytes`` are more than the member's
    part by now: give back what is not being written.
    """

    num_bytes: int
    short_bytes: int = 0
    surplus_bytes: int = 0


def limit_bytes(totals: Totals, capacity_bytes: int, at_least: int) -> int:
    """What one member may hold: its part, but always ``at_least``, which one object takes."""
    return max(at_least, capacity_bytes // HELD_PARTS // max(1, totals.num_members))


def grant(db: sqlite3.Connection, slot: int, num_bytes: int, at_least: int, capacity_bytes: int) -> Grant:
    """Add up to ``num_bytes`` to what a member holds; nothing while a rebuild is under way."""
    totals = read_totals(db)
    if not totals.is_complete:
        return Grant(0)
    held = read_grant(db, slot)
    limit = limit_bytes(totals, capacity_bytes, at_least)
    wanted = min(num_bytes, max(0, limit - held))
    granted = max(0, min(wanted, capacity_bytes - totals.num_bytes))
    if granted:
        write_grant(db, slot, held + granted)
    return Grant(granted, wanted - granted, max(0, held + granted - limit))


def give_back(db: sqlite3.Connection, slot: int, num_bytes: int) -> int:
    """Take up to ``num_bytes`` from what a member holds; returns what it holds then."""
    left = max(0, read_grant(db, slot) - num_bytes)
    write_grant(db, slot, left)
    return left


def keep(db: sqlite3.Connection, slot: int, num_bytes: int, capacity_bytes: int) -> int:
    """Grant a member bytes that it has just made free, as far as the capacity is not exceeded; returns them."""
    kept = max(0, min(num_bytes, capacity_bytes - read_totals(db).num_bytes))
    if kept:
        write_grant(db, slot, read_grant(db, slot) + kept)
    return kept
