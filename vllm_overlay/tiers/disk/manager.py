# SPDX-License-Identifier: Apache-2.0
"""The index half of the disk tier."""

import itertools
import logging
import os
import secrets
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from vllm_overlay.config import ConfigError, parse_bytes
from vllm_overlay.planner.coverage import HitSource
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.base import LoadTicket, StoreTicket, TierManager, TierUsage
from vllm_overlay.tiers.disk.admission import UseCounter, WriteRate
from vllm_overlay.tiers.disk.async_lookup import SHUN_S, AsyncLookup, Recent
from vllm_overlay.tiers.disk.checksum import integrity_of
from vllm_overlay.tiers.disk.device import Device
from vllm_overlay.tiers.disk.format import MAX_PARENTS, file_bytes
from vllm_overlay.tiers.disk.ledger import Ledger
from vllm_overlay.tiers.disk.namespace import DiskNamespace, check_object_id
from vllm_overlay.tiers.disk.reclaimer import Grant, Limits, Reclaimer
from vllm_overlay.tiers.disk.recovery import Recovery
from vllm_overlay.tiers.disk.root import choose_root
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.disk.suspension import ReadableHits
from vllm_overlay.tiers.disk.tickets import DiskLoad, DiskStore
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.factory import make_policy

_OBJECTS_A_SLICE = 256
_AWAKE_S = 60.0
_JOIN_S = 2.0
logger = logging.getLogger(__name__)


class DiskTierManager(TierManager):
    """See ``TierManager``. Works from a lease of bytes and leaves everything that touches the disk to three threads.

    ``max_object_bytes`` is the largest object in one rank. Raises ConfigError when the root or ``capacity_bytes``
    cannot work; construction is the only call that may wait for the disk.
    """

    def __init__(
        self,
        settings: DiskTierSettings,
        namespace: DiskNamespace,
        world_size: int,
        max_object_bytes: int,
        device: Device | None = None,
    ) -> None:
        device = device or Device()
        self.index = PrefixIndex(capacity_bytes=None, policy=make_policy(settings.eviction_policy))
        self._world_size = world_size
        self._limits = self._limits_of(settings, max_object_bytes)
        rate = parse_bytes(settings.max_write_bytes_per_s, "max_write_bytes_per_s")
        self._write_rate = WriteRate(rate, self._bytes_on_disk(max_object_bytes))
        self._uses = UseCounter(settings.store_on_nth_use)
        integrity = integrity_of(settings.integrity_key_file, settings.encryption_key_file)
        root = choose_root(device, os.path.abspath(settings.root), bool(integrity.key))
        ledger = Ledger(root, device)
        ledger.check()
        self._name = settings.name
        self._first_namespace = namespace
        self._reset = ""
        self._tickets = itertools.count(1)
        self._in_flight: dict[int, Grant] = {}
        self._suspended: Recent[ObjectId] = Recent(SHUN_S)
        self._rewritten: dict[int, ObjectId] = {}
        """By ticket: suspended objects that are on their way once more. The index has them, pinned."""
        self._evicted = 0
        self._dropped = 0
        self._reclaimer = Reclaimer(root, namespace, world_size, self._limits, ledger, device, integrity, self._knows)
        self._recover = partial(
            Recovery, root, world_size=world_size, reclaimer=self._reclaimer, device=device, integrity=integrity
        )
        self._recovery = self._recover(namespace)
        self._awake_until = time.monotonic() + _AWAKE_S
        self._async_lookup = AsyncLookup(root, namespace, world_size, device, integrity)

    def _limits_of(self, settings: DiskTierSettings, max_object_bytes: int) -> Limits:
        capacity = parse_bytes(settings.capacity_bytes, "capacity_bytes")
        two_objects = 2 * self._bytes_on_disk(max_object_bytes)
        if capacity < two_objects:
            raise ConfigError(
                f"capacity_bytes={capacity} of the disk tier cannot hold two of the largest objects: "
                f"set it to at least {two_objects}"
            )
        min_free = parse_bytes(settings.min_free_bytes, "min_free_bytes")
        return Limits(capacity, min_free, least_batch_bytes=two_objects)

    def _bytes_on_disk(self, num_bytes: int) -> int:
        """What all ranks' files of an object of ``num_bytes`` a rank take."""
        return file_bytes(num_bytes) * self._world_size

    def _charged(self, planned: PlannedObject) -> PlannedObject:
        """As the index counts it: with the bytes of all ranks' files."""
        return msgspec.structs.replace(planned, num_bytes=self._bytes_on_disk(planned.num_bytes))

    # Background work's results.

    @property
    def is_recovering(self) -> bool:
        """Whether objects of an earlier life may still turn up."""
        return not self._recovery.is_done

    def advance(self) -> None:
        if self._reclaimer.root_was_replaced():
            self._begin_anew()
        found = self._recovery.take(_OBJECTS_A_SLICE)
        if found:
            self._forget(self.index.restore([self._charged(item) for item in found]))
        self._take_in([item for item in self._async_lookup.take(_OBJECTS_A_SLICE) if self._may_find(item.object_id)])
        self._reclaimer.report_own_bytes(None if self.is_recovering else self.index.used_bytes)
        if self.is_recovering:  # what looks like a leaf may have children that recovery has yet to find
            return
        if short_bytes := self._reclaimer.short_bytes:
            self._make_room(short_bytes)

    def has_more_to_come(self) -> bool:
        """So that the first request after a start finds what is there; a scan that takes minutes is not waited for."""
        return self.is_recovering and time.monotonic() < self._awake_until

    def _knows(self, object_id: ObjectId) -> bool:
        """Called from the reclaimer's thread: one look into a dictionary."""
        return self.index.contains(object_id)

    def _may_find(self, object_id: ObjectId) -> bool:
        return not self._reclaimer.is_removing(object_id)

    def _take_in(self, found: Sequence[PlannedObject]) -> None:
        """Other processes' objects: what cannot be reached from here is theirs to keep or remove."""
        self.index.restore([self._charged(item) for item in found])

    def look_further(
        self, planner: HybridOffloadPlanner, keys: Sequence[bytes], num_tokens: int, num_known: int
    ) -> None:
        self._async_lookup.ask(planner, keys, num_tokens, num_known)

    def _make_room(self, num_bytes: int) -> None:
        """Evict so much, least recently used leaves first; the bytes come into the lease once they are unlinked."""
        evicted: list[Entry] = []
        freed = 0
        while freed < num_bytes and (leaf := self.index.evict_one()) is not None:
            evicted.append(leaf)
            freed += leaf.num_bytes
        self._evicted += len(evicted)
        self._reclaimer.reuse([leaf.object_id for leaf in evicted], freed)

    def _forget(self, released: Sequence[Entry | PlannedObject]) -> None:
        """Nobody needs these objects' bytes any more."""
        num_bytes = sum(item.num_bytes for item in released)
        self._reclaimer.remove([item.object_id for item in released], num_bytes)

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
        if not _has_a_name(planned) or self._reclaimer.is_removing(planned.object_id):
            return None
        charged = self._charged(planned)
        is_rewrite = self._may_rewrite(planned.object_id)
        if not is_rewrite and not self.index.may_reserve(charged):
            return None
        may_write = self._write_rate.allows(charged.num_bytes)
        grant = self._reclaimer.reserve(charged.num_bytes) if may_write else None
        if grant is None:
            self._dropped += 1
            return None
        self._write_rate.spend(charged.num_bytes)
        ticket = next(self._tickets)
        if is_rewrite:
            self._rewritten[ticket] = planned.object_id
            self.index.pin([planned.object_id])
        else:
            self._suspended.discard(planned.object_id)
            self.index.reserve(charged, ticket)
        self._in_flight[ticket] = grant
        return StoreTicket(ticket, planned, DiskStore(grant.slot, self._reset, grant.over))

    def commit(self, ticket: int) -> None:
        if (grant := self._in_flight.pop(ticket, None)) is not None:
            self._reclaimer.commit(grant)
        if (rewritten := self._rewritten.pop(ticket, None)) is not None:
            self._suspended.discard(rewritten)
            self.release([rewritten])
        self._forget(self.index.commit(ticket).released)

    def abort(self, ticket: int) -> None:
        if (grant := self._in_flight.pop(ticket, None)) is not None:
            self._reclaimer.release(grant)
        if (rewritten := self._rewritten.pop(ticket, None)) is not None:
            self.release([rewritten])
        self._forget(self.index.abort(ticket))

    # Loads.

    def acquire(self, planned: Sequence[PlannedObject]) -> list[LoadTicket] | None:
        entries = self.index.pin([item.object_id for item in planned])
        if entries is None:
            return None
        return [
            LoadTicket(entry.ticket, item.object_id, item.num_bytes, DiskLoad(self._reset))
            for entry, item in zip(entries, planned, strict=True)
        ]

    def release(self, object_ids: Sequence[ObjectId]) -> None:
        self._forget(self.index.unpin(object_ids))

    # Removal.

    def drop(self, object_id: ObjectId) -> None:
        if object_id in self._rewritten.values():
            self.suspend(object_id)  # its old file is about to be replaced, and what builds on it is right
        else:
            self._async_lookup.shun(object_id)
            self._forget(self.index.drop(object_id))

    def suspend(self, object_id: ObjectId) -> None:
        """For ``SHUN_S``, or until it is stored again. Its file stays, and with it what builds on it."""
        self._suspended.add(object_id)

    def clear(self) -> None:
        """Begin a new namespace of this process alone: the weights may be others from now on.

        What was stored before stays for those who serve it, and goes first when nobody does. This process finds it
        again once it is restarted and the weights' files say that it is right.
        """
        self._reset = secrets.token_hex(8)
        self._async_lookup.stop()
        self._recovery.stop()
        self._suspended = Recent(SHUN_S)
        self.index.clear()
        self._reclaimer.move(self._first_namespace.since(self._reset))
        logger.info("%s: reset; objects of before are not loaded any more", self._name)

    def _begin_anew(self) -> None:
        """Another root, or none, lies where ours was: know what is there."""
        self._recovery.stop()
        self._suspended = Recent(SHUN_S)
        self.index.clear()
        self._recovery = self._recover(self._first_namespace.since(self._reset))

    def usage(self) -> TierUsage:
        return TierUsage(
            num_objects=len(self.index),
            used_bytes=self.index.used_bytes,
            capacity_bytes=self._limits.capacity_bytes,
            evicted_objects=self._evicted,
            dropped_objects=self._dropped,
        )

    def close(self) -> None:
        self._async_lookup.close()
        self._recovery.close(_JOIN_S)
        self._reclaimer.close(_JOIN_S)


def _has_a_name(planned: PlannedObject) -> bool:
    """Whether a file name and a header can carry the object."""
    try:
        for object_id in (planned.object_id, *planned.parents):
            check_object_id(object_id)
    except ValueError:
        return False
    return len(planned.parents) <= MAX_PARENTS and planned.num_bytes > 0
