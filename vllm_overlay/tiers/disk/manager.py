# SPDX-License-Identifier: Apache-2.0
"""The index half of the disk tier."""

import itertools
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_overlay.config import ConfigError, parse_bytes
from vllm_overlay.planner.coverage import HitSource
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import LoadTicket, StoreTicket, TierManager, TierUsage
from vllm_overlay.tiers.disk.admission import UseCounter, WriteRate
from vllm_overlay.tiers.disk.bookkeeper import Bookkeeper
from vllm_overlay.tiers.disk.evictor import Quota
from vllm_overlay.tiers.disk.files.checksum import integrity_of
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.format import MAX_PARENTS, file_bytes
from vllm_overlay.tiers.disk.files.learned_file import read_learned
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace, check_object_id
from vllm_overlay.tiers.disk.files.root import choose_root
from vllm_overlay.tiers.disk.ranking import Ranker
from vllm_overlay.tiers.disk.recent import Recent
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.disk.suspension import SUSPENDED_S, ReadableHits
from vllm_overlay.tiers.disk.tickets import DiskLoad, DiskStore
from vllm_overlay.tiers.disk.updates import (
    Committed,
    Forgotten,
    Found,
    Gone,
    Refused,
    ReloadBegins,
    ReloadEnds,
    ServedNamespace,
    Update,
)
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.never import NeverEvicts
from vllm_overlay.tiers.policies.reuse import Learned

STEP_S = 0.001
"""A call of ``advance`` takes in updates, or ranks, for so long: an engine at work steps every few milliseconds."""
_AWAKE_S = 60.0
_KEEP_LEARNED_S = 1.0
"""What was learned is written down no more often, and at the end."""
_JOIN_S = 2.0
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Store:
    """An object from its ticket until the catalogue is told of it. ``num_bytes`` are of all ranks' files.

    ``is_rewrite``: the index has the object, pinned, and its files could not be read.
    """

    served: ServedNamespace
    planned: PlannedObject
    num_bytes: int
    is_rewrite: bool
    is_written: bool = False


class DiskTierManager(TierManager):
    """See ``TierManager``. Its index is what the catalogue has of one namespace; it never touches the disk itself.

    ``max_object_bytes`` is the largest object in one rank; without ``geometry`` nothing is ranked, as with "lru".
    Raises ConfigError when the root, ``capacity_bytes`` or ``eviction_policy`` cannot work; construction is the only
    call that may wait for the disk.
    """

    def __init__(
        self,
        settings: DiskTierSettings,
        namespace: DiskNamespace,
        world_size: int,
        max_object_bytes: int,
        device: Device | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        device = device or Device()
        self._world_size = world_size
        if settings.eviction_policy not in ("auto", "learned", "lru"):
            raise ConfigError(
                f"eviction_policy={settings.eviction_policy!r} of the disk tier cannot work: all processes of its root "
                'evict in one order: set it to "learned" or "lru"'
            )
        quota = quota_of(settings, max_object_bytes, world_size)
        self._capacity_bytes = quota.capacity_bytes
        rate = parse_bytes(settings.max_write_bytes_per_s, "max_write_bytes_per_s")
        self._write_rate = WriteRate(rate, quota.largest_bytes)
        self._uses = UseCounter(settings.store_on_nth_use)
        integrity = integrity_of(settings.encryption_key_file)
        root = choose_root(device, os.path.abspath(settings.root))
        self._geometry = geometry if settings.eviction_policy != "lru" else None
        self._keep_learned_at = 0.0
        self._ranker = self._new_ranker(read_learned(root, namespace.attention) if self._geometry else None)
        self.index = _new_index(self._ranker)
        self._name = settings.name
        self._first_namespace = namespace
        self._reset = ""
        self._tickets = itertools.count(1)
        self._stores: dict[int, _Store] = {}
        self._suspended: Recent[ObjectId] = Recent(SUSPENDED_S)
        self._rewritten: dict[int, ObjectId] = {}
        """By ticket: suspended objects that are on their way once more. The index has them, pinned."""
        self._removing: Counter[ObjectId] = Counter()
        """Names whose files are about to be unlinked, so that a new store would be lost with them."""
        self._unconfirmed: set[ObjectId] = set()
        """Objects that the catalogue has yet to take in."""
        self._unseen: set[ObjectId] = set()
        """What a reload that is under way has not found yet."""
        self._outdated: set[ObjectId] = set()
        """What the last reload has not found."""
        self._pinned: Counter[ObjectId] = Counter()
        self._pinned_before: Counter[ObjectId] = Counter()
        """What loads hold in the index, and what they hold in one that a reset has replaced."""
        self._dropped = 0
        self._served = ServedNamespace(namespace)
        self._awake_until = time.monotonic() + _AWAKE_S
        self._bookkeeper = Bookkeeper(root, self._served, world_size, quota, device, integrity)

    def _new_ranker(self, learned: Learned | None) -> Ranker | None:
        return None if self._geometry is None else Ranker(self._geometry, self._capacity_bytes, learned)

    def _bytes_on_disk(self, num_bytes: int) -> int:
        """What all ranks' files of an object of ``num_bytes`` a rank take."""
        return bytes_on_disk(num_bytes, self._world_size)

    # What the bookkeeper tells.

    @property
    def is_recovering(self) -> bool:
        """Whether objects of an earlier life may still turn up."""
        return not self._served.is_complete or bool(self._served.updates or self._outdated)

    def advance(self) -> None:
        updates = self._served.updates
        deadline = time.perf_counter() + STEP_S
        while self._outdated and time.perf_counter() < deadline:
            self._forget(self._outdated.pop())
        while updates and time.perf_counter() < deadline:
            self._apply(updates.popleft())
        if self._ranker is not None and (ranking := self._ranker.advance(deadline)) is not None:
            self._bookkeeper.rank(self._served, ranking, time.time() - time.monotonic())
            if time.monotonic() >= self._keep_learned_at:
                self._keep_learned_at = time.monotonic() + _KEEP_LEARNED_S
                self._bookkeeper.keep(self._ranker.learned())

    def has_more_to_come(self) -> bool:
        """So that the first request after a start finds what is there; a scan that takes minutes is not waited for."""
        return self.is_recovering and time.monotonic() < self._awake_until

    def _apply(self, update: Update) -> None:
        match update:
            case Found(objects):
                self._take_in(objects)
            case Gone(object_id):
                self._discard_all(self.index.drop_evicted(object_id))
                self._served.holds.unclaim([object_id])
            case Committed(object_id):
                self._unconfirmed.discard(object_id)
            case Refused(object_id):
                self._unconfirmed.discard(object_id)
                self._forget(object_id)
            case Forgotten(object_id):
                self._end_removal(object_id)
            case ReloadBegins():
                self._unseen = set(self.index.visible()) - self._unconfirmed
            case ReloadEnds(going):
                self._outdated |= self._unseen
                self._unseen = set()
                self._served.holds.unclaim(going)

    def _take_in(self, objects: Sequence[PlannedObject]) -> None:
        for gone in (self._unseen, self._outdated):
            if gone:
                gone.difference_update(item.object_id for item in objects)
        # What builds on an object that was dropped here cannot be reached: it stays for those who can.
        self.index.restore([item for item in objects if item.object_id not in self._removing])

    def _forget(self, object_id: ObjectId) -> None:
        """It is not there any more, nor what depends on it."""
        self._discard_all(self.index.drop(object_id))

    def _end_removal(self, object_id: ObjectId) -> None:
        self._removing[object_id] -= 1
        if self._removing[object_id] <= 0:
            del self._removing[object_id]

    # Lookups.

    def hits(self, geometry: Geometry, keys: Sequence[bytes], num_tokens: int) -> HitSource:
        if not (unreadable := self._suspended.names()):
            return self.index
        asked = set(keys)
        suspended = {object_id for object_id in unreadable if object_id.key in asked}
        return ReadableHits(self.index, suspended, geometry, keys) if suspended else self.index

    def has_or_awaits(self, object_id: ObjectId) -> bool:
        return self.index.has_or_awaits(object_id) and not self._may_rewrite(object_id)

    def _may_rewrite(self, object_id: ObjectId) -> bool:
        """Whether the object is here, could not be read, and is not on its way once more."""
        is_unreadable = object_id in self._suspended and self.index.has(object_id)
        return is_unreadable and object_id not in self._rewritten.values()

    # Stores.

    def should_store(self, object_id: ObjectId) -> bool:
        return self._uses.is_due(object_id)

    def reserve(self, planned: PlannedObject) -> StoreTicket | None:
        if not _has_a_name(planned) or planned.object_id in self._removing:
            return None
        num_bytes = self._bytes_on_disk(planned.num_bytes)
        is_rewrite = self._may_rewrite(planned.object_id)
        if not is_rewrite and not self.index.may_reserve(planned):
            return None
        if not self._take_room(num_bytes, planned.parents):
            self._dropped += 1
            return None
        ticket = next(self._tickets)
        self._stores[ticket] = _Store(self._served, planned, num_bytes, is_rewrite)
        if is_rewrite:
            self._rewritten[ticket] = planned.object_id
            self.index.pin([planned.object_id])
        else:
            self._suspended.discard(planned.object_id)
            self.index.reserve(planned, ticket, num_bytes=num_bytes)
        return StoreTicket(ticket, planned, DiskStore(self._reset))

    def _take_room(self, num_bytes: int, parents: Sequence[ObjectId]) -> bool:
        """Whether there are bytes for an object now. Then its parents stay until the catalogue has it."""
        if not self._write_rate.allows(num_bytes) or not self._served.holds.hold(parents):
            return False
        if not self._bookkeeper.reserve(num_bytes):
            self._served.holds.release(parents)
            return False
        self._write_rate.spend(num_bytes)
        return True

    def commit(self, ticket: int) -> None:
        if (store := self._stores.get(ticket)) is None:
            return
        if store.served is not self._served:
            self._discard(ticket)
        elif store.is_rewrite:
            self._suspended.discard(store.planned.object_id)
            self._tell_of(ticket)
            self._end_rewrite(ticket)
        else:
            store.is_written = True
            visible, released = self.index.commit(ticket)
            for entry in visible:
                self._tell_of(entry.ticket)
            self._discard_all(released)

    def abort(self, ticket: int) -> None:
        if (store := self._stores.get(ticket)) is None:
            return
        if store.served is not self._served:
            self._discard(ticket)
        elif store.is_rewrite:
            self._discard(ticket)
            self._end_rewrite(ticket)
        else:
            self._discard_all(self.index.abort(ticket))

    def _tell_of(self, ticket: int) -> None:
        """The object of a store can be found: others shall find it too."""
        if (store := self._stores.pop(ticket, None)) is not None:
            self._unconfirmed.add(store.planned.object_id)
            if self._ranker is not None:
                self._ranker.stored(store.num_bytes)
            self._bookkeeper.commit(store.served, store.planned, store.num_bytes, ticket)

    def _end_rewrite(self, ticket: int) -> None:
        self._discard_all(self.index.unpin([self._rewritten.pop(ticket)]))

    def _discard_all(self, released: Iterable[Entry]) -> None:
        """Of what the index has released: the files of stores that the catalogue will not hear of."""
        for entry in released:
            self._discard(entry.ticket)

    def _discard(self, ticket: int) -> None:
        if (store := self._stores.pop(ticket, None)) is not None:
            if store.served is self._served:
                self._removing[store.planned.object_id] += 1
            self._bookkeeper.discard(store.served, store.planned, store.num_bytes)

    # Loads.

    def acquire(self, planned: Sequence[PlannedObject]) -> list[LoadTicket] | None:
        object_ids = [item.object_id for item in planned]
        if not self._served.holds.hold(object_ids):
            return None
        if (entries := self.index.pin(object_ids)) is None:
            self._served.holds.release(object_ids)
            return None
        self._pinned.update(object_ids)
        self._bookkeeper.use(self._served, object_ids)
        return [
            LoadTicket(entry.ticket, item.object_id, item.num_bytes, DiskLoad(self._reset))
            for entry, item in zip(entries, planned, strict=True)
        ]

    def release(self, object_ids: Sequence[ObjectId]) -> None:
        if self._pinned_before:
            object_ids = [object_id for object_id in object_ids if not _take_one(self._pinned_before, object_id)]
        for object_id in object_ids:
            _take_one(self._pinned, object_id)
        self._served.holds.release(object_ids)
        self._discard_all(self.index.unpin(object_ids))

    def touch(self, object_ids: Sequence[ObjectId]) -> None:
        self.index.touch(object_ids)
        self._bookkeeper.use(self._served, [object_id for object_id in object_ids if self.index.has(object_id)])

    # Removal.

    def drop(self, object_id: ObjectId) -> None:
        if object_id in self._rewritten.values():
            self.suspend(object_id)  # its old file is about to be replaced, and what builds on it is right
            return
        self._forget(object_id)
        self._removing[object_id] += 1
        self._bookkeeper.drop(self._served, object_id)

    def suspend(self, object_id: ObjectId) -> None:
        """For ``SUSPENDED_S``, or until it is stored again. Its file stays, and with it what builds on it."""
        self._suspended.add(object_id)

    def clear(self) -> None:
        """Begin a new namespace of this process alone: the weights may be others from now on.

        What was stored before stays for those who serve it, and goes first when nobody does. This process finds it
        again once it is restarted and the weights' files say that it is right.
        """
        for ticket in [ticket for ticket, store in self._stores.items() if store.is_written]:
            self._discard(ticket)
        self._reset = secrets.token_hex(8)
        self._served = ServedNamespace(self._first_namespace.since(self._reset))
        self._bookkeeper.serve(self._served, retired=self.index)
        if self._ranker is not None:
            self._ranker = self._new_ranker(self._ranker.learned())
        self.index = _new_index(self._ranker)
        self._suspended = Recent(SUSPENDED_S)
        self._rewritten, self._unconfirmed, self._unseen, self._outdated = {}, set(), set(), set()
        self._removing.clear()
        self._pinned_before.update(self._pinned)
        self._pinned.clear()
        logger.info("%s: reset: what was stored before is not loaded any more", self._name)

    def usage(self) -> TierUsage:
        return TierUsage(
            num_objects=len(self.index),
            used_bytes=self.index.used_bytes,
            capacity_bytes=self._capacity_bytes,
            evicted_objects=self._bookkeeper.num_evicted,
            dropped_objects=self._dropped,
        )

    def close(self) -> None:
        if self._ranker is not None:
            self._bookkeeper.keep(self._ranker.learned())
        self._bookkeeper.close(_JOIN_S)


def bytes_on_disk(num_bytes: int, world_size: int) -> int:
    """What all ranks' files of an object of ``num_bytes`` a rank take."""
    return file_bytes(num_bytes) * world_size


def quota_of(settings: DiskTierSettings, max_object_bytes: int, world_size: int) -> Quota:
    """The limits that the settings give. Raises ConfigError when ``capacity_bytes`` is too small to work."""
    capacity = parse_bytes(settings.capacity_bytes, "capacity_bytes")
    largest = bytes_on_disk(max_object_bytes, world_size)
    if capacity < 2 * largest:
        raise ConfigError(
            f"capacity_bytes={capacity} of the disk tier cannot hold two of the largest objects: "
            f"set it to at least {2 * largest}"
        )
    return Quota(capacity, parse_bytes(settings.min_free_bytes, "min_free_bytes"), largest)


def _new_index(ranker: Ranker | None) -> PrefixIndex:
    """What goes is for the catalogue to say."""
    return PrefixIndex(capacity_bytes=None, policy=NeverEvicts() if ranker is None else ranker.policy)


def _take_one(counts: Counter[ObjectId], object_id: ObjectId) -> bool:
    """Whether there was one to take."""
    if not counts[object_id]:
        return False
    counts[object_id] -= 1
    if not counts[object_id]:
        del counts[object_id]
    return True


def _has_a_name(planned: PlannedObject) -> bool:
    """Whether a file name and a header can carry the object."""
    try:
        for object_id in (planned.object_id, *planned.parents):
            check_object_id(object_id)
    except ValueError:
        return False
    return len(planned.parents) == len(set(planned.parents)) <= MAX_PARENTS and planned.num_bytes > 0
