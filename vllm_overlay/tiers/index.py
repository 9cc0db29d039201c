# SPDX-License-Identifier: Apache-2.0
"""The prefix-closed index of a tier: what is there, what is on its way, what may go.

Life of an entry: ``reserve`` (a ticket travels to the ranks) - ``commit`` (every rank has its bytes) - visible once its
parents are - ``evict`` or ``drop``.

An object is visible only while everything it depends on is. So coverage of a prompt is monotone, and a lookup may
search it in halves.

Bytes are handed back exactly once, as the entry in some method's list of *released* entries. Only then may the caller
reuse the entry's units or remove its file.

An entry may be dropped while a rank writes it or a load reads it. It becomes invisible at once. It keeps its bytes, its
place in ``used_bytes`` and its name until the ticket ends or the last pin goes. Then ``commit``, ``abort`` or ``unpin``
releases it. Its name cannot be reserved before that, so a name never stands for two sets of bytes.
"""

import contextlib
import copy
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from vllm_overlay.planner.objects import SNAPSHOT_TAG, ObjectId, PlannedObject
from vllm_overlay.tiers.entry import COMMITTED, DROPPED, RESERVED, STORED, Entry, EntryState
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed

_HALF = 1 << 16


class EvictedNames:
    """The names that were evicted last: at least ``_HALF`` of them, at most twice as many and one call's.

    That is about 9 MB: it keeps hashes of names. A name is taken for another one in one of 10^13 questions. Not
    thread-safe.
    """

    def __init__(self, half: int = _HALF) -> None:
        self._half = half
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def add(self, object_ids: Iterable[ObjectId]) -> None:
        self._newer.update(map(hash, object_ids))
        if len(self._newer) >= self._half:
            self._newer, self._older = set(), self._newer

    def __contains__(self, object_id: ObjectId) -> bool:
        name = hash(object_id)
        return name in self._newer or name in self._older


class Commit(NamedTuple):
    """What a completed store changed: entries that became visible, and entries whose bytes nobody needs any more."""

    visible: list[Entry]
    released: list[Entry]


class PrefixIndex:
    """Implements the planner's ``HitSource``. Lives in the scheduler process, and is called from its thread only.

    Bytes are those of one rank, as the planner counts them. So is ``capacity_bytes`` (None: no limit). Unknown names
    and tickets are ignored everywhere: a late report is no error.
    """

    def __init__(self, capacity_bytes: int | None, policy: EvictionPolicy[Entry] | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._policy = LeastRecentlyUsed[Entry]() if policy is None else policy
        self._tells_removed = type(self._policy).removed is not EvictionPolicy.removed
        self._entries: dict[ObjectId, Entry] = {}
        self._in_flight: dict[int, Entry] = {}
        self._evicted = EvictedNames()
        self._used_bytes = 0
        self._clock = 0

    # Questions.

    def __len__(self) -> int:
        """Objects that take up bytes, in whatever state."""
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """Bytes of all entries, in whatever state."""
        return self._used_bytes

    def fits(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more stay within the capacity."""
        return self.capacity_bytes is None or self._used_bytes + num_bytes <= self.capacity_bytes

    def get(self, object_id: ObjectId) -> Entry | None:
        """The entry of a visible object."""
        entry = self._entries.get(object_id)
        return entry if entry is not None and entry.state is COMMITTED else None

    def has(self, object_id: ObjectId) -> bool:
        """Whether the object is visible."""
        return self.get(object_id) is not None

    def contains(self, object_id: ObjectId) -> bool:
        """Whether the name is taken: the object is visible, on its way, or dropped but still held."""
        return object_id in self._entries

    def has_or_awaits(self, object_id: ObjectId) -> bool:
        """Whether the object is visible or on its way."""
        entry = self._entries.get(object_id)
        return entry is not None and entry.state is not DROPPED

    def visible(self) -> Iterator[ObjectId]:
        """The names of all visible objects. Nothing may change meanwhile."""
        return (object_id for object_id, entry in self._entries.items() if entry.state is COMMITTED)

    def parents_of(self, planned: PlannedObject) -> tuple[Entry, ...] | None:
        """The entries of its parents, each visible or on its way. None when one is neither."""
        found = []
        for object_id in planned.parents:
            entry = self._entries.get(object_id)
            if entry is None or entry.state is DROPPED:
                return None
            found.append(entry)
        return tuple(found)

    def reservable(self, planned: Iterable[PlannedObject]) -> tuple[list[PlannedObject], list[ObjectId]]:
        """Those that ``reserve`` would take one after the other if there is room for all, and which names must stay for
        that: what they hang on, and what of ``planned`` is here already."""
        found: dict[ObjectId, PlannedObject] = {}
        keep: list[ObjectId] = []
        for item in planned:
            if item.object_id in self._entries:
                keep.append(item.object_id)
                continue
            num_kept = len(keep)
            for parent in item.parents:
                if parent in found:
                    continue
                if not self.has_or_awaits(parent):
                    del keep[num_kept:]
                    break
                keep.append(parent)
            else:
                found[item.object_id] = item
        return list(found.values()), keep

    def nearest_snapshot_chunk(self, object_id: ObjectId) -> int:
        """See ``HitSource``. Amortised O(log n): paths once walked are remembered."""
        found = self.get(object_id)
        passed = []
        while found is not None and not found.num_snapshots:
            passed.append(found)
            found = found.jump
        for entry in passed:
            entry.jump = found
        return 0 if found is None else found.end_tokens

    def was_evicted(self, object_id: ObjectId) -> bool:
        """See ``HitSource``."""
        return object_id in self._evicted

    # Stores.

    def reserve(
        self, planned: PlannedObject, ticket: int, units: tuple[int, ...] = (), num_bytes: int | None = None
    ) -> Entry | None:
        """Takes the object's name and bytes before its ticket goes out. ``num_bytes``: what it takes up here, if more
        than is planned.

        Returns None, and changes nothing, when the name is taken, a parent is neither here nor on its way, or it does
        not fit (call ``evict`` first). ``ticket`` must be new: raises ValueError when it is in flight.
        """
        if ticket in self._in_flight:
            raise ValueError(f"ticket {ticket} is in flight already")
        num_bytes = planned.num_bytes if num_bytes is None else num_bytes
        if planned.object_id in self._entries or not self.fits(num_bytes):
            return None
        if (parents := self.parents_of(planned)) is None:
            return None
        entry = self._in_flight[ticket] = self._insert(planned, parents, ticket, units, num_bytes)
        return entry

    def reserve_all(
        self,
        planned: Iterable[PlannedObject],
        tickets: Iterable[int],
        units: Iterable[tuple[int, ...]],
        sizes: Iterable[int],
    ) -> list[Entry]:
        """As ``reserve`` for each, of what ``reservable`` has found, once there is room for all. Asks nothing again.

        When it raises, nothing is reserved.
        """
        reserved: list[Entry] = []
        try:
            for item, ticket, rows, num_bytes in zip(planned, tickets, units, sizes, strict=True):
                parents = tuple(map(self._entries.__getitem__, item.parents))
                entry = self._in_flight[ticket] = self._insert(item, parents, ticket, rows, num_bytes)
                reserved.append(entry)
        except BaseException:
            for entry in reversed(reserved):
                self.abort(entry.ticket)
            raise
        return reserved

    def commit(self, ticket: int) -> Commit:
        """Every rank has stored the object. It is visible once its parents are, and others on top of it may become so
        too.

        When the object was dropped meanwhile, it is released instead.
        """
        return self.commit_all((ticket,))

    def commit_all(self, tickets: Iterable[int]) -> Commit:
        """As ``commit`` for each. Tickets end last, so that after a policy's exception each can be committed anew."""
        ended = {ticket: entry for ticket in tickets if (entry := self._in_flight.get(ticket)) is not None}
        stored = [entry for entry in ended.values() if entry.state in (RESERVED, STORED)]
        for entry in stored:
            entry.state = STORED
        visible = self._publish(stored)
        for ticket in ended:
            del self._in_flight[ticket]
        return Commit(visible, [self._release(entry) for entry in ended.values() if entry.state is DROPPED])

    def abort(self, ticket: int) -> list[Entry]:
        """The object could not be stored. It goes, with everything on top. Returns the released entries.

        Entries on top of it whose own tickets are out are released when those end.
        """
        entry = self._in_flight.pop(ticket, None)
        if entry is None:
            return []
        if entry.state is DROPPED:
            return [self._release(entry)]
        entry.state = STORED
        return self._drop_tree(entry)

    def restore(self, planned: Iterable[PlannedObject], tickets: Iterable[int] = itertools.repeat(0)) -> None:
        """Puts back what a tier found of an earlier life or another process, parents first.

        What hangs on something that is neither here nor on its way is passed over, and so is what is here already.
        Where recency is known, give the longest unused first. The capacity does not limit this: call ``evict(0)``
        afterwards.
        """
        restored: list[Entry] = []
        for item, ticket in zip(planned, tickets, strict=False):
            if item.object_id not in self._entries and (parents := self.parents_of(item)) is not None:
                entry = self._insert(item, parents, ticket, (), item.num_bytes)
                entry.state = STORED
                restored.append(entry)
        self._publish(restored)

    # Loads.

    def pin(self, object_ids: Sequence[ObjectId]) -> list[Entry] | None:
        """Keeps visible objects for a load, all or none (then None). Counts as a use. Undone by ``unpin``."""
        entries = [entry for object_id in object_ids if (entry := self.get(object_id)) is not None]
        if len(entries) != len(object_ids):
            return None
        self._clock += 1
        self._policy.used(entries)
        for entry in entries:
            entry.last_use = self._clock
            self._hold(entry)
        return entries

    def unpin(self, object_ids: Iterable[ObjectId]) -> list[Entry]:
        """Undoes one ``pin``. Returns the released entries: those dropped meanwhile which nothing else holds."""
        pinned = [entry for object_id in object_ids if (entry := self._entries.get(object_id)) is not None]
        return [entry for entry in pinned if entry.pins and self._let_go(entry)]

    def touch(self, object_ids: Iterable[ObjectId]) -> None:
        """These objects were used now. Those that are visible go late."""
        self._clock += 1
        entries = [entry for object_id in object_ids if (entry := self.get(object_id)) is not None]
        self._policy.used(entries)
        for entry in entries:
            entry.last_use = self._clock
            self._offer(entry)

    # Removal.

    def drop(self, object_id: ObjectId) -> list[Entry]:
        """Forgets an object and everything on top of it at once. Returns the released entries.

        Entries that are pinned or in flight follow from ``unpin``, ``commit`` or ``abort``.
        """
        entry = self._entries.get(object_id)
        return [] if entry is None else self._drop_tree(entry)

    def drop_evicted(self, object_id: ObjectId) -> list[Entry]:
        """As ``drop``, for an object that somebody else has evicted."""
        if object_id in self._entries:
            self._evicted.add([object_id])
        return self.drop(object_id)

    def clear(self) -> list[Entry]:
        """Forgets everything, as ``drop`` does."""
        roots = [entry for entry in self._entries.values() if not entry.parents]
        return [entry for root in roots for entry in self._drop_tree(root)]

    def close(self) -> None:
        """As ``clear``, on a thread of its own: to take a million entries apart takes seconds, and nothing else frees
        them. The engine may go on with another index."""
        retired = copy.copy(self)
        self._entries, self._in_flight, self._used_bytes, self._policy = {}, {}, 0, LeastRecentlyUsed()
        with contextlib.suppress(RuntimeError):  # there is no thread to be had, and the process may be about to end
            threading.Thread(target=retired.clear, name="closed-index", daemon=True).start()

    def evict(self, num_bytes: int, keep: Sequence[ObjectId] = ()) -> list[Entry]:
        """Evicts until ``num_bytes`` more fit or nothing may go. Returns the released entries. Ask ``fits`` after that.

        ``keep`` stay: the parents of the object that the room is for. An object that could never fit evicts nothing.
        """
        if self.fits(num_bytes) or self.capacity_bytes is None or num_bytes > self.capacity_bytes:
            return []
        released: list[Entry] = []
        kept = [entry for object_id in keep if (entry := self.get(object_id)) is not None]
        for entry in kept:
            self._hold(entry)
        room = self.capacity_bytes - num_bytes
        while self._used_bytes > room and (leaf := self._policy.pop()) is not None:
            gone = [leaf] if leaf.unit is None else self._with_its_unit(leaf, self._used_bytes - room)
            if self._tells_removed:
                self._policy.removed(gone)
            for entry in gone:
                entry.state = DROPPED
                del self._entries[entry.object_id]
                self._used_bytes -= entry.num_bytes
            self._detach(gone[-1], was_visible=True)
            released += gone
        self._evicted.add([entry.object_id for entry in released])
        for entry in kept:
            self._let_go(entry)
        return released

    @staticmethod
    def _with_its_unit(last: Entry, num_bytes: int) -> list[Entry]:
        """A leaf, and what it alone hangs on while that is of its unit and fewer than ``num_bytes`` go. What has gone
        is detached, but for the last one."""
        gone, freed = [last], last.num_bytes
        while freed < num_bytes and len(last.parents) == 1:
            (parent,) = last.parents
            if parent.unit is not last.unit or parent.pins or len(parent.children) > 1:
                break
            last.parents, last.jump = (), None
            parent.children.clear()
            gone.append(parent)
            freed += parent.num_bytes
            last = parent
        return gone

    # How it is done. No recursion anywhere: chains are as deep as prompts are long.

    def _insert(
        self, planned: PlannedObject, parents: tuple[Entry, ...], ticket: int, units: tuple[int, ...], num_bytes: int
    ) -> Entry:
        self._clock += 1
        object_id = planned.object_id
        entry = Entry(object_id, num_bytes, planned.end_tokens, ticket, units, self._clock, parents)
        self._entries[object_id] = entry
        self._used_bytes += num_bytes
        for parent in parents:
            if not parent.children and parent.state is COMMITTED:
                self._policy.discard(parent)
            parent.children[entry] = None
            if parent.object_id.tag == object_id.tag:
                entry.jump = parent if parent.num_snapshots else parent.jump
        return entry

    def _publish(self, stored: Iterable[Entry]) -> list[Entry]:
        """Makes each of ``stored`` visible if its parents are, and what waited for it. Returns what became so."""
        visible: list[Entry] = []
        waiting = list(stored)
        for entry in waiting:
            if entry.state is not STORED:
                continue
            for parent in entry.parents:
                if parent.state is not COMMITTED:
                    break
            else:
                entry.state = COMMITTED
                visible.append(entry)
                waiting.extend(entry.children)
        try:
            self._policy.stored(visible)
        finally:
            for entry in visible:
                if not entry.children:
                    self._offer(entry)
                if entry.object_id.tag == SNAPSHOT_TAG:
                    for parent in entry.parents:
                        self._count_snapshot(parent)
        return visible

    def _count_snapshot(self, chunk: Entry) -> None:
        """A snapshot below ``chunk`` is visible. The first one of a chunk stops the jumps of the chunks below it here.

        That costs a walk over the chunks below, down to the next ones which have snapshots. They are few for a prompt's
        last boundary, and those of all siblings for a junction.
        """
        chunk.num_snapshots += 1
        below = [chunk] if chunk.num_snapshots == 1 else []
        while below:
            for child in below.pop().children:
                if child.object_id.tag != chunk.object_id.tag:
                    continue
                if child.jump is None or child.jump.end_tokens < chunk.end_tokens:
                    child.jump = chunk
                if not child.num_snapshots:
                    below.append(child)

    def _drop_tree(self, root: Entry) -> list[Entry]:
        """Makes ``root`` and all on top of it invisible. Returns those that neither a ticket nor a pin holds."""
        doomed: list[tuple[Entry, EntryState]] = []
        found = [root]
        while found:
            entry = found.pop()
            if entry.state is not DROPPED:
                doomed.append((entry, entry.state))
                entry.state = DROPPED
                found.extend(entry.children)
        released = []
        for entry, before in reversed(doomed):
            self._policy.discard(entry)
            if before is COMMITTED and self._tells_removed:
                self._policy.removed([entry])
            self._detach(entry, before is COMMITTED)
            if before is not RESERVED and not entry.pins:
                released.append(self._release(entry))
        return released

    def _detach(self, entry: Entry, was_visible: bool) -> None:
        """Takes a dropped entry off its parents. What was on top of it is off already, and it is offered no more."""
        counted = was_visible and entry.object_id.tag == SNAPSHOT_TAG
        for parent in entry.parents:
            parent.children.pop(entry, None)
            parent.num_snapshots -= counted
            if not parent.children and parent.state is COMMITTED and not parent.pins:  # as ``_offer``
                self._policy.add(parent, parent.last_use, parent.end_tokens)
        entry.parents, entry.jump = (), None

    def _release(self, entry: Entry) -> Entry:
        del self._entries[entry.object_id]
        self._used_bytes -= entry.num_bytes
        return entry

    def _hold(self, entry: Entry) -> None:
        if not entry.pins and not entry.children:
            self._policy.discard(entry)
        entry.pins += 1

    def _let_go(self, entry: Entry) -> bool:
        """Takes one pin off; True when that released the entry."""
        entry.pins -= 1
        if entry.state is DROPPED and not entry.pins:
            self._release(entry)
            return True
        if not entry.children:
            self._offer(entry)
        return False

    def _offer(self, entry: Entry) -> None:
        """Tells the policy of an entry that may be evicted."""
        if entry.state is COMMITTED and not entry.children and not entry.pins:
            self._policy.add(entry, entry.last_use, entry.end_tokens)
