# SPDX-License-Identifier: Apache-2.0
"""The index half of the disk tier."""

import itertools
import logging
import secrets
import time
from collections.abc import Collection, Iterable, Sequence

from vllm_overlay.config import ConfigError, parse_bytes
from vllm_overlay.planner.coverage import HitSource
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import LoadTicket, StoreTicket, TierManager, TierUsage
from vllm_overlay.tiers.disk.admission import UseCounter, WriteRate
from vllm_overlay.tiers.disk.bookkeeper import Bookkeeper
from vllm_overlay.tiers.disk.catalogue import File, Gone
from vllm_overlay.tiers.disk.catalogue.rows import MAX_PARENTS
from vllm_overlay.tiers.disk.files.checksum import integrity_of
from vllm_overlay.tiers.disk.files.device import Device, make_room_for_descriptors
from vllm_overlay.tiers.disk.files.format import file_bytes
from vllm_overlay.tiers.disk.files.lease import take_lease
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace, check_stored_id
from vllm_overlay.tiers.disk.files.root import choose_root
from vllm_overlay.tiers.disk.hidden import UNREADABLE_S, Hidden, VisibleHits
from vllm_overlay.tiers.disk.messages import (
    Committed,
    DiskPart,
    FileTickets,
    Found,
    Reload,
    ServedNamespace,
    Store,
    Update,
)
from vllm_overlay.tiers.disk.ranking import Ranker, read_learned
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.disk.site import Site
from vllm_overlay.tiers.disk.volume import Quota
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.base import NeverEvicts
from vllm_overlay.tiers.policies.reuse import Learned

STEP_S = 0.001
"""A call of ``advance`` takes in updates, or ranks, for so long: an engine at work steps every few milliseconds."""
_AWAKE_S = 60.0
"""So long an idle engine steps for what is still to come."""
_KEEP_LEARNED_S = 1.0
"""What was learned is written down no more often, and at the end."""
_JOIN_S = 2.0
logger = logging.getLogger(__name__)


class DiskTierManager(TierManager):
    """See ``TierManager``. Its index is what the catalogue has of one namespace; it never touches the disk itself.

    ``max_object_bytes`` is the largest object in one rank, ``step_bytes`` what a full step stores there, 0 if that is
    not known; without ``geometry`` nothing is ranked, as with "lru".
    Raises ConfigError when the root or ``capacity_bytes`` cannot work; construction is the only call that may wait for
    the disk.
    """

    def __init__(
        self,
        settings: DiskTierSettings,
        namespace: DiskNamespace,
        world_size: int,
        max_object_bytes: int,
        device: Device | None = None,
        geometry: Geometry | None = None,
        step_bytes: int = 0,
    ) -> None:
        make_room_for_descriptors()
        device = device or Device()
        self._quota = quota = quota_of(settings, max_object_bytes, world_size, step_bytes)
        rate = parse_bytes(settings.max_write_bytes_per_s, "max_write_bytes_per_s")
        self._write_rate = WriteRate(rate, quota.largest_bytes)
        self._uses = UseCounter(settings.store_on_nth_use)
        integrity = integrity_of(settings.encryption_key_file)
        root = choose_root(device, settings.root, settings.host_name)
        lease = take_lease(device, root)
        self._geometry = geometry if settings.eviction_policy != "lru" else None
        self._keep_learned_at = 0.0
        may_read = self._geometry is not None and (lease is None or lease.is_held)
        learned = read_learned(root, namespace.fingerprint) if may_read else None
        self._world_size, self._name, self._first_namespace = world_size, settings.name, namespace
        self._numbers = itertools.count(1)
        self._tickets = FileTickets()
        self._stores: dict[int, Store] = {}
        self._begin(namespace, learned)
        self._awake_until: float | None = None
        site = Site(root, device, integrity, quota, world_size)
        self._bookkeeper = Bookkeeper(site, self._served, lease)

    def _begin(self, namespace: DiskNamespace, learned: Learned | None) -> None:
        """Serve a namespace of which nothing is known yet."""
        self._served = ServedNamespace(namespace)
        geometry, capacity = self._geometry, self._quota.capacity_bytes
        self._ranker = None if geometry is None else Ranker(geometry, capacity, learned)
        policy = NeverEvicts() if self._ranker is None else self._ranker.policy
        self.index = PrefixIndex(capacity_bytes=None, policy=policy)  # what goes is for the catalogue to say
        self._hidden = Hidden()
        self._unconfirmed: set[ObjectId] = set()
        """Objects that the catalogue has yet to take in."""
        self._unseen: set[ObjectId] = set()
        """What a reload that is under way has not found yet."""
        self._outdated: set[ObjectId] = set()
        """What the last reload has not found."""

    # What the bookkeeper tells.

    @property
    def is_recovering(self) -> bool:
        """Whether objects of an earlier life may still turn up."""
        return not self._served.is_complete or bool(self._served.updates or self._outdated)

    def advance(self) -> None:
        deadline = time.perf_counter() + STEP_S
        while self._take_in_one() and time.perf_counter() < deadline:
            pass
        if self._ranker is not None and (ranking := self._ranker.advance(deadline)) is not None:
            self._bookkeeper.rank(self._served, ranking)
            if time.monotonic() >= self._keep_learned_at:
                self._keep_learned_at = time.monotonic() + _KEEP_LEARNED_S
                self._bookkeeper.keep(self._ranker.learned())

    def has_more_to_come(self) -> bool:
        """So that the first request after a start finds what is there; a scan that takes minutes is not waited for.

        The time counts from the first call: an engine may take minutes until it can step.
        """
        if not self.is_recovering:
            return False
        if self._awake_until is None:
            self._awake_until = time.monotonic() + _AWAKE_S
        return time.monotonic() < self._awake_until

    def _take_in_one(self) -> bool:
        """One piece, whatever the clock says: a thread may lose its core at any line. Returns whether there is more."""
        outdated, updates = self._outdated, self._served.updates
        if outdated:
            self._forget(outdated.pop())
        elif updates:
            self._apply(updates.popleft())
        return bool(outdated or updates)

    def _apply(self, update: Update) -> None:
        match update:
            case Found(objects, files):
                self._take_in(objects, files)
            case Gone(object_id, file):
                if self._has_file(object_id, file):
                    self._hidden.discard(object_id)
                    self._discard_all(self.index.drop_evicted(object_id))
            case Committed(object_id, file, counts):
                self._unconfirmed.discard(object_id)
                if counts is None and self._has_file(object_id, file):
                    self._forget(object_id)
                elif counts is not None and counts != file:
                    self._change_file(object_id, file, counts)
            case Reload.BEGINS:
                self._unseen = set(self.index.visible()) - self._unconfirmed
            case Reload.ENDS:
                self._outdated |= self._unseen
                self._unseen = set()

    def _take_in(self, objects: Sequence[PlannedObject], files: Sequence[File]) -> None:
        for gone in (self._unseen, self._outdated):
            if gone:
                gone.difference_update(planned.object_id for planned in objects)
        tickets = list(map(self._tickets.ticket, files))
        for planned, ticket in zip(objects, tickets, strict=True):
            entry = self.index.get(planned.object_id)
            if entry is not None and 0 < ticket < entry.ticket:
                continue  # the news of a file of ours is late: we have stored it anew since
            if entry is not None and entry.ticket != ticket:  # somebody has stored it anew
                entry.ticket = ticket
                self._hidden.discard(planned.object_id)
        self.index.restore(objects, tickets)

    def _has_file(self, object_id: ObjectId, file: File) -> bool:
        """Whether the index has the object, in this file."""
        entry = self.index.get(object_id)
        return entry is not None and entry.ticket == self._tickets.ticket(file)

    def _change_file(self, object_id: ObjectId, before: File, now: File) -> None:
        entry = self.index.get(object_id)
        if entry is not None and entry.ticket == self._tickets.ticket(before):
            entry.ticket = self._tickets.ticket(now)

    def _forget(self, object_id: ObjectId) -> None:
        """It is not there any more, nor what depends on it."""
        self._hidden.discard(object_id)
        self._discard_all(self.index.drop(object_id))

    # Lookups.

    def hits(self, geometry: Geometry, keys: Sequence[bytes], num_tokens: int) -> HitSource:
        self._bookkeeper.expect_stores()
        if self._hidden and (hidden := self._hidden.among(set(keys))):
            return VisibleHits(self.index, hidden, geometry, keys)
        return self.index

    def has(self, object_id: ObjectId) -> bool:
        """Whether the object can be loaded, for who asks object by object: one that is hidden cannot."""
        self._bookkeeper.expect_stores()
        return self.index.has(object_id) and object_id not in self._hidden

    def has_or_awaits(self, object_id: ObjectId) -> bool:
        return self.index.has_or_awaits(object_id) and self._replaceable(object_id) is None

    def _replaceable(self, object_id: ObjectId) -> File | None:
        """The file of an object that is here, hidden, and not on its way once more."""
        if not self._hidden or object_id not in self._hidden or (entry := self.index.get(object_id)) is None:
            return None
        is_replacing = any(
            store.replaces is not None and store.served is self._served and store.planned.object_id == object_id
            for store in self._stores.values()
        )
        return None if is_replacing else self._tickets.file(entry.ticket)

    # Stores.

    def unwanted(self, object_ids: Sequence[ObjectId]) -> Collection[ObjectId]:
        return [object_id for object_id in object_ids if not self._uses.is_due(object_id)]

    def reserve(self, planned: PlannedObject) -> StoreTicket | None:
        served = self._served
        replaces = self._replaceable(planned.object_id)
        if replaces is None and self.index.contains(planned.object_id):
            return None
        found = self.index.parents_of(planned)
        if found is None or not _has_a_name(served.namespace, planned):
            return None
        parents = tuple([self._tickets.file(entry.ticket) for entry in found])
        num_bytes = bytes_on_disk(planned.num_bytes, self._world_size)
        if not (writer := self._take_room(num_bytes, parents)):
            return None
        file = File(writer, next(self._numbers))
        ticket = self._tickets.of_store(file)
        self._stores[ticket] = Store(served, planned, file, num_bytes, parents, replaces)
        if replaces is not None:
            self.index.pin([planned.object_id])
        else:
            self._hidden.discard(planned.object_id)
            self.index.reserve(planned, ticket, num_bytes=num_bytes)
        return StoreTicket(ticket, planned, _part(served, file))

    def _take_room(self, num_bytes: int, parents: Sequence[File]) -> str:
        """Whose file an object is to be, if there are bytes for it now. Then its parents stay until the catalogue has
        it."""
        if not self._write_rate.allows(num_bytes) or not self._served.holds.hold(parents):
            return ""
        if not (writer := self._bookkeeper.reserve(num_bytes)):
            self._served.holds.release(parents)
            return ""
        self._write_rate.spend(num_bytes)
        return writer

    def commit(self, ticket: int) -> None:
        self.commit_all((ticket,))

    def commit_all(self, tickets: Sequence[int]) -> None:
        written = []
        for ticket in tickets:
            if (store := self._stores.get(ticket)) is None:
                continue
            if store.served is not self._served:
                self._discard(ticket)
            elif store.replaces is not None:
                self._change_file(store.planned.object_id, store.replaces, store.file)
                self._hidden.discard(store.planned.object_id)
                self._tell_of(ticket)
                self._discard_all(self.index.unpin([store.planned.object_id]))
            else:
                store.is_written = True
                written.append(ticket)
        visible, released = self.index.commit_all(written)
        for entry in visible:
            self._tell_of(entry.ticket)
        self._discard_all(released)

    def abort(self, ticket: int) -> None:
        if (store := self._stores.get(ticket)) is None:
            return
        if store.served is not self._served:
            self._discard(ticket)
        elif store.replaces is not None:
            self._discard(ticket)
            self._discard_all(self.index.unpin([store.planned.object_id]))
        else:
            self._discard_all(self.index.abort(ticket))

    def _tell_of(self, ticket: int) -> None:
        """The object of a store can be found: others shall find it too."""
        if (store := self._stores.pop(ticket, None)) is not None:
            self._unconfirmed.add(store.planned.object_id)
            if self._ranker is not None:
                self._ranker.stored(store.num_bytes)
            self._bookkeeper.end(store)

    def _discard_all(self, released: Iterable[Entry]) -> None:
        """Of what the index has released: the files of stores that the catalogue will not hear of."""
        for entry in released:
            self._discard(entry.ticket)

    def _discard(self, ticket: int) -> None:
        if (store := self._stores.pop(ticket, None)) is not None:
            store.is_wanted = False
            self._bookkeeper.end(store)

    # Loads.

    def acquire(self, planned: Sequence[PlannedObject]) -> list[LoadTicket] | None:
        object_ids = [item.object_id for item in planned]
        entries = [entry for object_id in object_ids if (entry := self.index.get(object_id)) is not None]
        files = [self._tickets.file(entry.ticket) for entry in entries]
        if len(files) < len(planned) or not self._served.holds.hold(files):
            return None
        self.index.pin(object_ids)
        self._bookkeeper.use(self._served, object_ids)
        return [
            LoadTicket(entry.ticket, item.object_id, item.num_bytes, _part(self._served, file))
            for entry, item, file in zip(entries, planned, files, strict=True)
        ]

    def release(self, tickets: Sequence[LoadTicket]) -> None:
        own = [ticket for ticket in tickets if ticket.part.fingerprint == self._served.namespace.fingerprint]
        self._served.holds.release(ticket.part.file for ticket in own)
        self._discard_all(self.index.unpin([ticket.object_id for ticket in own]))

    def touch(self, object_ids: Sequence[ObjectId]) -> None:
        self.index.touch(object_ids)
        self._bookkeeper.use(self._served, [object_id for object_id in object_ids if self.index.has(object_id)])

    # Removal.

    def drop(self, object_id: ObjectId) -> None:
        """An object whose file is gone or wrong is hidden until it is stored anew: what builds on it is right."""
        if self.index.has(object_id):
            self._hidden.add(object_id)
        else:
            self._forget(object_id)

    def suspend(self, object_id: ObjectId) -> None:
        self._hidden.add(object_id, UNREADABLE_S)

    def clear(self) -> None:
        """Begin a private namespace: the weights may be others from now on.

        What was stored before stays for those who serve it, and goes first when nobody does. This process finds it
        again once it is restarted and the weights' files say that it is right.
        """
        for ticket, store in list(self._stores.items()):
            if store.is_written:
                self._discard(ticket)
        retired, learned = self.index, None if self._ranker is None else self._ranker.learned()
        self._begin(self._first_namespace.since(secrets.token_hex(8)), learned)
        self._bookkeeper.serve(self._served, retired)
        logger.info("%s: reset: what was stored before is not loaded any more", self._name)

    def usage(self) -> TierUsage:
        return TierUsage(
            num_objects=len(self.index),
            used_bytes=self.index.used_bytes,
            capacity_bytes=self._bookkeeper.usable_bytes,
            evicted_objects=self._bookkeeper.num_evicted,
        )

    def close(self) -> None:
        if self._ranker is not None:
            self._bookkeeper.keep(self._ranker.learned())
        self._bookkeeper.close(_JOIN_S)
        self.index.close()


def bytes_on_disk(num_bytes: int, world_size: int) -> int:
    """What all ranks' files of an object of ``num_bytes`` a rank take."""
    return file_bytes(num_bytes) * world_size


def quota_of(settings: DiskTierSettings, max_object_bytes: int, world_size: int, step_bytes: int = 0) -> Quota:
    """The limits that the settings give, for objects and full steps of so many bytes in one rank.

    Raises ConfigError when ``capacity_bytes`` is too small to work.
    """
    capacity = parse_bytes(settings.capacity_bytes, "capacity_bytes")
    keep = parse_bytes(settings.min_free_bytes, "min_free_bytes")
    quota = Quota(capacity, keep, bytes_on_disk(max_object_bytes, world_size), world_size * step_bytes)
    if capacity < quota.least_bytes:
        raise ConfigError(
            f"capacity_bytes={capacity} of the disk tier cannot hold two of the largest objects: "
            f"set it to at least {quota.least_bytes}"
        )
    return quota


def _part(served: ServedNamespace, file: File) -> DiskPart:
    return DiskPart(file, served.namespace.fingerprint, served.namespace.is_private)


def _has_a_name(namespace: DiskNamespace, planned: PlannedObject) -> bool:
    """Whether a header can carry the object. Its parents are on the disk already."""
    try:
        check_stored_id(namespace.stored_id(planned.object_id))
    except ValueError:
        return False
    return len(planned.parents) == len(set(planned.parents)) <= MAX_PARENTS and planned.num_bytes > 0
