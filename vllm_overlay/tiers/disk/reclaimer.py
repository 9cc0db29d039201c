# SPDX-License-Identifier: Apache-2.0
"""Room: a lease kept filled ahead of the stores, and the thread that unlinks what was evicted."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.device import Device, remove_quietly, temporary_name
from vllm_overlay.tiers.disk.foreign_eviction import ForeignEviction
from vllm_overlay.tiers.disk.lease import Lease, RecycledFile
from vllm_overlay.tiers.disk.ledger import Ledger, LedgerState
from vllm_overlay.tiers.disk.membership import Membership
from vllm_overlay.tiers.disk.namespace import DiskNamespace
from vllm_overlay.tiers.disk.scan import count_files, sweep_temporaries

TICK_S = 1.0
_READY_S = 60.0
_BATCHES = 32
logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)


@dataclass(frozen=True, slots=True)
class Limits:
    """In bytes. A process leases ``least_batch_bytes`` ahead, or more where there is much room."""

    capacity_bytes: int
    min_free_bytes: int
    least_batch_bytes: int

    def batch_bytes(self, num_bytes: int) -> int:
        """What a process leases ahead where all objects together may take ``num_bytes``."""
        return max(num_bytes // _BATCHES, self.least_batch_bytes)


@dataclass(frozen=True, slots=True)
class _PendingRemoval:
    """What to unlink: the files of all ranks of ``object_ids``, of ``num_bytes`` together, and ``paths``.

    ``may_be_kept`` says that stores may as well write over these objects' files.
    """

    namespace: DiskNamespace
    object_ids: tuple[ObjectId, ...]
    paths: tuple[str, ...]
    num_bytes: int
    may_be_kept: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """Bytes set aside for a store, in the lease ``slot``. ``over`` are files to write over, one a rank, or none."""

    slot: int
    num_bytes: int
    over: tuple[str, ...] = ()


class Reclaimer:
    """Owns this process's lease and all unlinking on behalf of its scheduler. One a DiskTierManager, with one thread.

    ``is_known`` is asked from the reclaimer's thread whether the scheduler knows of an object.
    The public methods are called from the scheduler's thread and never wait for the disk; the work is done in the
    reclaimer's thread, where every OSError is logged and tried again a second later.
    """

    def __init__(
        self,
        root: str,
        namespace: DiskNamespace,
        world_size: int,
        limits: Limits,
        ledger: Ledger,
        device: Device,
        integrity: Integrity = XXH3,
        is_known: Callable[[ObjectId], bool] = lambda object_id: True,
    ) -> None:
        self._root = root
        self._namespace = namespace
        self._world_size = world_size
        self._limits = limits
        self._ledger = ledger
        self._device = device
        self._is_known = is_known
        self._membership = Membership(root, ledger, device, has_key=bool(integrity.key))
        self._foreign = ForeignEviction(root, ledger, device, integrity)
        self._lease = Lease()
        self._batch_bytes = limits.least_batch_bytes
        self._must_count = True
        self._root_was_replaced = False
        self._is_ready = threading.Event()
        self._changed = threading.Condition()
        self._is_woken = True
        self._is_closing = False
        self._pending_removals: deque[_PendingRemoval] = deque()
        self._pending_removal_bytes = 0
        self._returned: deque[Grant] = deque()
        self._must_shrink = False
        self._removing: set[ObjectId] = set()
        self._short_bytes = 0
        self._own_bytes: int | None = None
        self._file_bytes = 0
        self._thread = threading.Thread(target=self._run, name="disk-reclaimer", daemon=True)
        self._thread.start()

    # From the scheduler's thread.

    def reserve(self, num_bytes: int) -> Grant | None:
        """Set bytes aside for a store, in files to write over if there are some; None when there is no room now."""
        if (slot := self._membership.slot) is None:
            return None
        over = self._lease.reserve(num_bytes)
        if over is None or self._lease.is_low(self._batch_bytes):
            self._wake()
        return None if over is None else Grant(slot, num_bytes, over)

    def commit(self, grant: Grant) -> None:
        """All ranks have stored."""
        self._lease.commit(grant.num_bytes, is_over=bool(grant.over))

    def release(self, grant: Grant) -> None:
        """A rank has not stored: what it did not write over is unlinked before its bytes can be had again."""
        if not grant.over:
            return self._lease.commit(grant.num_bytes)
        self._returned.append(grant)
        return self._wake()

    def reuse(self, object_ids: Sequence[ObjectId], num_bytes: int) -> None:
        """As ``remove``, but their files may stay under other names for stores to write over."""
        if object_ids:
            self._schedule_removal(_PendingRemoval(self._namespace, tuple(object_ids), (), num_bytes, may_be_kept=True))

    def remove(self, object_ids: Sequence[ObjectId], num_bytes: int) -> None:
        """Unlink all ranks' files of these objects, which are of ``num_bytes`` together."""
        if object_ids:
            self._schedule_removal(_PendingRemoval(self._namespace, tuple(object_ids), (), num_bytes))

    def remove_paths(self, paths: Sequence[str]) -> None:
        """Unlink files that recovery cannot use. Called from the recovery thread."""
        self._schedule_removal(_PendingRemoval(self._namespace, (), tuple(paths), 0))

    def _schedule_removal(self, removal: _PendingRemoval) -> None:
        with self._changed:
            self._pending_removals.append(removal)
            self._pending_removal_bytes += removal.num_bytes
            self._short_bytes = max(0, self._short_bytes - removal.num_bytes)
            self._removing.update(removal.object_ids)
            self._is_woken = True
            self._changed.notify()

    def is_removing(self, object_id: ObjectId) -> bool:
        """Whether files of this name are about to be unlinked, so that a new store would be lost with them."""
        return object_id in self._removing

    def is_alone(self) -> bool:
        """Whether no other process uses this root. Called from the recovery thread, waits for the lease."""
        if not self._is_ready.wait(_READY_S):
            return False
        try:
            return self._ledger.count_processes() == 1
        except OSError:
            return False

    @property
    def short_bytes(self) -> int:
        """How much the scheduler should evict, for the lease to be a full batch again; others' objects cannot help."""
        return self._short_bytes

    def move(self, namespace: DiskNamespace) -> None:
        """Serve this namespace from now on, and the one before no more."""
        self._namespace = namespace
        self._wake()

    def root_was_replaced(self) -> bool:
        """Whether, since the last call, the root was found to be another one: what was in it is not here."""
        is_new, self._root_was_replaced = self._root_was_replaced, False
        return is_new

    def report_own_bytes(self, num_bytes: int | None) -> None:
        """What this process's index holds; None while recovery may still add to it."""
        self._own_bytes = num_bytes

    def close(self, timeout_s: float) -> None:
        """Finish what is queued, give the lease back but for stores still under way, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    # In the reclaimer's thread.

    def _run(self) -> None:
        while not self._is_closing:
            self._try(self._work)
            with self._changed:
                self._changed.wait_for(lambda: self._is_woken or self._is_closing, TICK_S)
                self._is_woken = False
        self._try(self._remove_pending)
        self._try(self._unlink_returned)
        self._try(self._unlink_recycled)
        self._try(self._give_lease_back)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except SHUTDOWN:
            raise
        except BaseException as error:
            _log.warning("reclaimer", "disk tier: cannot make room under %s: %r", self._root, error)

    def _work(self) -> None:
        slot = self._hold_membership()
        if self._must_count:
            sweep_temporaries(self._root, self._device)
            self._foreign.remove_abandoned_namespaces()
            is_alone = self._ledger.count_processes() == 1
            self._ledger.reconcile(lambda: count_files(self._root, self._device, is_alone))
            self._must_count = False
        self._remove_pending()
        self._unlink_returned()
        short = self._refill(slot)
        while short and self._remove_others(short):
            short = self._refill(slot)
        with self._changed:
            self._short_bytes = max(0, short - self._pending_removal_bytes)
        self._membership.describe()

    def _hold_membership(self) -> int:
        """Hold a lease and the namespace that is served, under the root that is there now; returns the lease's slot."""
        namespace = self._namespace
        if self._membership.is_lost():
            _log.warning("root", "disk tier: %s was removed or replaced; beginning anew in what is there", self._root)
            self._membership.let_go()
            self._unlink_recycled()  # for the root may be the old one, without our lease in it
            self._lease.drop_all()
            self._forget_pending()
            self._must_count = self._root_was_replaced = True
        if self._membership.slot is None:
            self._membership.take(namespace)
            self._is_ready.set()
        elif self._membership.namespace is not namespace:
            self._membership.serve(namespace)
            self._must_count = True
        self._foreign.own = namespace.fingerprints
        assert self._membership.slot is not None
        return self._membership.slot

    def _refill(self, slot: int) -> int:
        """Bring the lease to a full batch; returns how many bytes it is short of that, once counting cannot help."""
        free_bytes = self._device.free_bytes(self._root) + self._lease.recycled_bytes - self._limits.min_free_bytes
        with self._ledger.locked() as state:
            self._batch_bytes = self._limits.batch_bytes(self._usable_bytes(state, free_bytes))
            self._file_bytes = state.file_bytes or 0
            room = self._room(state, free_bytes)
            state.leases[slot], short = self._lease.refill(state.leases[slot], self._batch_bytes, room)
            self._must_shrink = self._lease.must_shrink(room)
            if state.file_bytes is None or (short and self._ledger.dead_slots(state)):
                self._must_count = self._is_woken = True
                return 0
        if self._must_shrink and self._lease.recycled_bytes:
            self._unlink_recycled()
            self._is_woken = True
        return min(short, self._batch_bytes)

    def _usable_bytes(self, state: LedgerState, free_bytes: int) -> int:
        """What all objects together may take: a file system smaller than ``capacity_bytes`` is the limit."""
        return min(self._limits.capacity_bytes, (state.file_bytes or 0) + max(0, free_bytes))

    def _room(self, state: LedgerState, free_bytes: int) -> int:
        """What all leases together may still grow by; negative when there is too much already."""
        if state.file_bytes is None:
            return 0
        return min(self._limits.capacity_bytes - state.file_bytes, free_bytes) - sum(state.leases)

    def _remove_pending(self) -> None:
        while self._pending_removals:
            removal = self._pending_removals[0]
            self._ledger.remove_files([*removal.paths, *self._paths_to_unlink(removal)])
            with self._changed:
                self._pending_removals.popleft()
                self._pending_removal_bytes -= removal.num_bytes
                self._removing.difference_update(removal.object_ids)

    def _forget_pending(self) -> None:
        """They are not here: files of these names, if there are any, are others'."""
        with self._changed:
            self._pending_removals.clear()
            self._pending_removal_bytes = 0
            self._removing.clear()

    def _paths_to_unlink(self, removal: _PendingRemoval) -> Iterator[str]:
        """The files of all ranks of the objects, but for those that are kept as recycled files.

        None is kept while there is less room than was leased, nor while others use the root: they may be reading it.
        """
        may_be_kept = removal.may_be_kept and not self._must_shrink and self._ledger.count_processes() == 1
        slot = self._membership.slot if may_be_kept else None
        for object_id in removal.object_ids:
            paths = [removal.namespace.path_of(self._root, object_id, rank) for rank in range(self._world_size)]
            if slot is None or not self._keep(slot, paths):
                yield from paths

    def _keep(self, slot: int, paths: Sequence[str]) -> bool:
        """Make a recycled file of an object's files; False when that would be too many, or not all files are there.

        At most half a batch are recycled files: the other half is for objects of other sizes.
        """
        most_bytes = self._batch_bytes // 2 - self._lease.recycled_bytes
        if most_bytes <= 0:
            return False
        temporaries = tuple(os.path.join(os.path.dirname(path), temporary_name()) for path in paths)
        try:
            num_bytes = self._ledger.retire(slot, list(zip(paths, temporaries, strict=True)), most_bytes)
        except OSError as error:
            _log.warning("retire", "disk tier: evicted files cannot be kept, so they are unlinked: %s", error)
            self._unlink(temporaries)
            return False
        if num_bytes:
            self._lease.put_back(RecycledFile(temporaries, num_bytes))
        return bool(num_bytes)

    def _unlink_recycled(self) -> None:
        for recycled in self._lease.take_recycled():
            self._unlink(recycled.paths)
            self._lease.scrapped(recycled)

    def _unlink_returned(self) -> None:
        while self._returned:
            grant = self._returned.popleft()
            self._unlink(grant.over)
            self._lease.commit(grant.num_bytes, is_over=True)

    def _unlink(self, temporaries: Sequence[str]) -> None:
        for path in temporaries:
            remove_quietly(self._device, path)

    def _remove_others(self, num_bytes: int) -> int:
        """Remove what nobody serves; and while we have less than an equal share, what others serve.

        What we could not read at the start is nobody's: while we are alone it gives way until we have half of all.
        """
        removed = self._foreign.remove_idle(num_bytes)
        if removed or self._own_bytes is None:
            return removed
        num_processes = self._ledger.count_processes()
        share = self._limits.capacity_bytes // num_processes if num_processes > 1 else self._file_bytes // 2
        if self._own_bytes >= share:
            return 0
        removed = self._foreign.remove_used(num_bytes) if num_processes > 1 else 0
        return removed or self._foreign.remove_shared(num_bytes, self._is_known)

    def _give_lease_back(self) -> None:
        if self._membership.slot is None or self._membership.is_lost():
            return
        self._membership.describe(is_last=True)
        self._membership.stop_serving()
        self._foreign.own = ()
        self._foreign.remove_abandoned_namespaces()
        with self._ledger.locked() as state:
            lease = state.leases[self._membership.slot]
            state.leases[self._membership.slot] = min(lease, max(0, self._lease.in_flight))
        self._membership.let_go()
