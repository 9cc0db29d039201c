# SPDX-License-Identifier: Apache-2.0
"""Who uses a root: a row a process, and a file that the process keeps locked for as long as it lives.

A row whose lock can be taken is a dead process's. What it was granted stays its own until somebody has looked after
the files that it left: then ``bury`` frees the bytes.
"""

import fcntl
import os
import sqlite3
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from vllm_overlay.common.file_lock import is_in_place, try_lock
from vllm_overlay.tiers.disk.catalogue.errors import CatalogueError
from vllm_overlay.tiers.disk.catalogue.generations import MEMBERS
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespaces
from vllm_overlay.tiers.disk.catalogue.removals import read_removals, removal_bytes
from vllm_overlay.tiers.disk.catalogue.rows import (
    NUM_SLOTS,
    Id,
    Namespace,
    NumBytes,
    Pid,
    RemovedObject,
    Slot,
    read_all,
    read_value,
)


class MemberRow(msgspec.Struct, array_like=True, frozen=True):
    """``granted`` are bytes for files that are no objects yet."""

    slot: Slot
    pid: Pid
    granted: NumBytes


@dataclass(frozen=True, slots=True)
class DeadMember:
    """What a process left. ``granted_bytes`` cover files that it had written and not committed, somewhere in the
    directories of ``fingerprints``, and temporaries; ``removals`` are files that it wanted to unlink."""

    slot: int
    pid: int
    granted_bytes: int
    fingerprints: tuple[str, ...]
    removals: tuple[RemovedObject, ...]


class Membership:
    """A slot of this process's own, by its lock."""

    def __init__(self, slot: int, fd: int) -> None:
        self.slot = slot
        self._fd = fd
        _held.add(self)

    def is_in_place(self, root: str) -> bool:
        """Whether others still see that this process holds the slot. Raises OSError."""
        return is_in_place(slot_path(root, self.slot), self._fd)

    def release(self) -> None:
        """This process is no member from now on."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_held: "weakref.WeakSet[Membership]" = weakref.WeakSet()


def _leave_slots_to_parent() -> None:
    """A child holds its parent's locks too, and would keep them after the parent's end."""
    for membership in list(_held):
        membership.release()


os.register_at_fork(after_in_child=_leave_slots_to_parent)


def slot_path(root: str, slot: int) -> str:
    """The file that the owner of the slot keeps locked."""
    return os.path.join(root, MEMBERS, str(slot))


def is_alive(root: str, slot: int) -> bool:
    """Whether somebody holds the slot. A shared lock asks, so that two who ask do not take each other for the owner."""
    try:
        fd = os.open(slot_path(root, slot), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def count_living(root: str) -> int:
    """How many slots somebody holds, whatever catalogue it has open. Raises OSError."""
    names = os.listdir(os.path.join(root, MEMBERS))
    return sum(is_alive(root, int(name)) for name in names if name.isdecimal() and int(name) < NUM_SLOTS)


def read_members(db: sqlite3.Connection) -> list[MemberRow]:
    """All rows, of the living and the dead."""
    return read_all(MemberRow, db.execute(f"SELECT slot, pid, granted FROM member LIMIT {NUM_SLOTS + 1}"))


def join(db: sqlite3.Connection, root: str) -> Membership:
    """Add a row of this process. Raises CatalogueError when there are too many, OSError."""
    taken = {row.slot for row in read_members(db)}
    for slot in range(NUM_SLOTS):
        if slot in taken or (fd := try_lock(slot_path(root, slot))) is None:
            continue
        try:
            db.execute("INSERT INTO member VALUES (?, ?, 0)", (slot, os.getpid()))
        except BaseException:
            os.close(fd)
            raise
        return Membership(slot, fd)
    raise CatalogueError(f"{NUM_SLOTS} processes share {root} already")


def serve(db: sqlite3.Connection, slot: int, wanted: Iterable[Namespace], now: int) -> None:
    """Serve these namespaces, and no more what was served before."""
    namespaces = Namespaces(db)
    db.execute("DELETE FROM serve WHERE slot = ?", (slot,))
    for namespace in wanted:
        row = namespaces.serve(namespace, now)
        for number in {row.id, row.parents_id}:
            db.execute("INSERT OR IGNORE INTO serve VALUES (?, ?)", (slot, number))


def served_by(db: sqlite3.Connection, but: Iterable[int] = ()) -> dict[int, set[int]]:
    """The namespaces of each slot, ``but`` of these slots."""
    found: dict[int, set[int]] = {}
    for slot, namespace in read_all(tuple[Slot, Id], db.execute("SELECT slot, namespace FROM serve")):
        if slot not in but:
            found.setdefault(slot, set()).add(namespace)
    return found


def served(db: sqlite3.Connection, root: str) -> set[int]:
    """The namespaces that living members serve. Raises OSError."""
    return set[int]().union(*served_by(db, but=dead_slots(db, root)).values())


def dead_slots(db: sqlite3.Connection, root: str) -> set[int]:
    """Slots of processes that have ended. Raises OSError."""
    return {row.slot for row in read_members(db) if not is_alive(root, row.slot)}


def find_dead(db: sqlite3.Connection, root: str) -> list[DeadMember]:
    """Everything that ended processes left."""
    by_slot, namespaces = served_by(db), Namespaces(db)
    return [
        DeadMember(
            row.slot,
            row.pid,
            row.granted,
            tuple(sorted(namespaces.fingerprint_of(number) for number in by_slot.get(row.slot, ()))),
            tuple(read_removals(db, namespaces, row.slot)),
        )
        for row in read_members(db)
        if not is_alive(root, row.slot)
    ]


def inherit(db: sqlite3.Connection, root: str, slot: int, heir: int) -> list[RemovedObject]:
    """Give a dead process's removals to another slot; returns them. Raises OSError."""
    if (fd := try_lock(slot_path(root, slot))) is None:
        return []
    try:
        removed = read_removals(db, Namespaces(db), slot)
        db.execute("UPDATE removal SET slot = ? WHERE slot = ?", (heir, slot))
        return removed
    finally:
        os.close(fd)


def bury(db: sqlite3.Connection, root: str, slot: int) -> int:
    """Forget a dead process; returns the bytes that this frees, 0 when it lives. Raises OSError."""
    row = next((row for row in read_members(db) if row.slot == slot), None)
    if row is None or (fd := try_lock(slot_path(root, slot))) is None:
        return 0
    try:
        num_bytes = row.granted + removal_bytes(db, slot)
        _forget(db, slot)
        return num_bytes
    finally:
        os.close(fd)


def leave(db: sqlite3.Connection, slot: int, in_flight_bytes: int) -> None:
    """End a membership. With files on their way in or out, the row stays for whoever buries it."""
    granted = read_grant(db, slot)
    if in_flight_bytes or removal_bytes(db, slot):
        db.execute("UPDATE member SET granted = ? WHERE slot = ?", (min(granted, in_flight_bytes), slot))
    else:
        _forget(db, slot)


def read_grant(db: sqlite3.Connection, slot: int) -> int:
    """The bytes that a member has for files which are no objects yet. Raises Damaged when it has no row."""
    return int(read_value(NumBytes, db.execute("SELECT granted FROM member WHERE slot = ?", (slot,)).fetchone()))


def write_grant(db: sqlite3.Connection, slot: int, num_bytes: int) -> None:
    db.execute("UPDATE member SET granted = ? WHERE slot = ?", (num_bytes, slot))


def _forget(db: sqlite3.Connection, slot: int) -> None:
    for table in ("member", "serve", "removal"):
        db.execute(f"DELETE FROM {table} WHERE slot = ?", (slot,))
    db.execute("UPDATE meta SET rebuilder = NULL WHERE rebuilder = ?", (slot,))
