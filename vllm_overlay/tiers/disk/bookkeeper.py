# SPDX-License-Identifier: Apache-2.0
"""The thread between one scheduler and the catalogue of its root: everything that may wait for the disk."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue import (
    Catalogue,
    CatalogueError,
    Damaged,
    Name,
    Namespace,
    Scored,
    StoredObject,
    Superseded,
    Unavailable,
    replace_damaged,
)
from vllm_overlay.tiers.disk.catalogue.members import Membership
from vllm_overlay.tiers.disk.catalogue.room import Room
from vllm_overlay.tiers.disk.committer import Committer, Discarded, Dropped, Moved, Step, Stored
from vllm_overlay.tiers.disk.evictor import Evictor, Quota
from vllm_overlay.tiers.disk.files.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.learned_file import write_learned
from vllm_overlay.tiers.disk.files.manifest import Manifests
from vllm_overlay.tiers.disk.files.marker import is_marked, require_marker
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.files.root import lock_directory, open_with_locks
from vllm_overlay.tiers.disk.follower import Follower
from vllm_overlay.tiers.disk.maintenance.abandoned import remove_abandoned
from vllm_overlay.tiers.disk.maintenance.recovery import Recovery
from vllm_overlay.tiers.disk.maintenance.remover import UNLINK_THREADS, Remover
from vllm_overlay.tiers.disk.ranking import times_of
from vllm_overlay.tiers.disk.updates import ServedNamespace
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.base import Ranked
from vllm_overlay.tiers.policies.reuse import Learned

TICK_S = 0.5
_FIRST_TICKS_S = 0.05
"""A pause until all objects are known."""
_GATHER_S = 0.02
"""So long the thread waits for more to do, once it was woken: one transaction takes many objects."""
_JOIN_S = 1.0
_MOST_USED = 1 << 16
_SCORES_A_TURN = 4096
_SCORES_HOLD_S = 300
"""A few rankings' time. Of a process that ranks no more, what is worth little goes early for no longer."""
LATE_S = 5.0
"""So much later than a use the catalogue may hear of it: this process's own use is no other's."""
_log = RateLimitedLog(logging.getLogger(__name__))


@dataclass(frozen=True, slots=True)
class _Ranking:
    served: ServedNamespace
    scores: Iterator[Scored]


@dataclass(slots=True)
class _Session:
    """One open catalogue, and everything that works on it."""

    catalogue: Catalogue
    served: ServedNamespace
    remover: Remover
    committer: Committer
    evictor: Evictor
    follower: Follower
    recovery: Recovery

    def end(self, timeout_s: float = 0.0) -> None:
        self.recovery.close(timeout_s)
        self.catalogue.close()


class Bookkeeper:
    """One a DiskTierManager. Public methods are called from the scheduler's thread and never wait for the disk.

    Whatever goes wrong is logged and tried again soon. Meanwhile there is no new room, and what was found
    can be loaded.
    """

    def __init__(
        self,
        root: str,
        served: ServedNamespace,
        world_size: int,
        quota: Quota,
        device: Device,
        integrity: Integrity = XXH3,
    ) -> None:
        self._root = root
        self._served = served
        self._world_size = world_size
        self._quota = quota
        self._device = device
        self._integrity = integrity
        self._room = Room()
        self._steps: deque[Step] = deque()
        self._stuck: list[Discarded] = []
        self._removed: list[Dropped] = []
        self._used: deque[Name] = deque(maxlen=_MOST_USED)
        self._rankings: deque[_Ranking] = deque(maxlen=1)
        self._publishing: _Ranking | None = None
        self._learned: Learned | None = None
        self._retired: deque[PrefixIndex] = deque()
        self._session: _Session | None = None
        self._lost_member: Membership | None = None
        """Of a catalogue that is not there any more. It is kept until this process has joined the next one."""
        self._manifests = Manifests(root, device)
        self._must_ask_room = False
        self._changed = threading.Condition()
        self._is_woken = False
        self._is_closing = False
        self._num_turns = 0
        self.num_evicted = 0
        """Objects that this process has evicted, of whatever namespace."""
        self._thread = threading.Thread(target=self._run, name="disk-bookkeeper", daemon=True)
        self._thread.start()

    # From the scheduler's thread.

    def reserve(self, num_bytes: int) -> bool:
        """Take bytes for all ranks' files of an object; False when there is no room now."""
        is_granted = self._room.reserve(num_bytes)
        if not is_granted or self._room.available < self._room.in_flight:
            self._wake()
        return is_granted

    def commit(self, served: ServedNamespace, planned: PlannedObject, num_bytes: int, ticket: int) -> None:
        """Every rank has stored an object of a reservation of ``num_bytes``."""
        self._add(Stored(served, self._as_stored(served, planned, num_bytes, ticket)))

    def discard(self, served: ServedNamespace, planned: PlannedObject, num_bytes: int) -> None:
        """No rank writes the object of a reservation any more, and nobody wants its files."""
        self._add(Discarded(served, self._as_stored(served, planned, num_bytes, 0)))

    def drop(self, served: ServedNamespace, object_id: ObjectId) -> None:
        """Remove an object, which was found to be wrong, and everything on top of it, for every process."""
        self._add(Dropped(served, object_id))

    def use(self, served: ServedNamespace, object_ids: Iterable[ObjectId]) -> None:
        """These are used now: they go late."""
        self._used.extend(Name(served.namespace.fingerprint_of(each.tag), each) for each in object_ids)

    def rank(self, served: ServedNamespace, ranking: Sequence[Ranked], to_epoch_s: float) -> None:
        """From now on evict in this order. The ranking's clock and ``to_epoch_s`` are seconds since the epoch."""
        self._rankings.append(_Ranking(served, _scores_of(served.namespace, ranking, to_epoch_s)))

    def keep(self, learned: Learned) -> None:
        """Write it down soon, or at the end: for the next start of this namespace."""
        self._learned = learned

    def serve(self, served: ServedNamespace, retired: PrefixIndex) -> None:
        """Serve this namespace from now on, and the one before no more, whose index takes long to take apart."""
        self._served = served
        self._retired.append(retired)
        self._add(Moved(served))

    def close(self, timeout_s: float) -> None:
        """Finish what is queued, give the room back but for stores still under way, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _as_stored(self, served: ServedNamespace, planned: PlannedObject, num_bytes: int, ticket: int) -> StoredObject:
        fingerprint = served.namespace.fingerprint_of(planned.object_id.tag)
        return StoredObject(fingerprint, planned, self._world_size, num_bytes, ticket, int(time.time()))

    def _add(self, step: Step) -> None:
        self._steps.append(step)
        self._wake()

    def _wake(self) -> None:
        if self._is_woken:
            return
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def take_for_orphan(self, num_bytes: int) -> bool:
        """Take bytes for a file that was found. Called from the recovery thread, which asks again until it has them.

        0 bytes: nobody waits any more.
        """
        self._room.wanted_bytes = num_bytes
        if not num_bytes or self._room.take(num_bytes):
            return bool(num_bytes)
        self._wake()
        return False

    # In the bookkeeper's thread.

    def _run(self) -> None:
        while not self._is_closing:
            self._try(self._turn)
            self._num_turns += 1
            with self._changed:
                tick = TICK_S if self._served.is_complete else _FIRST_TICKS_S
                self._changed.wait_for(lambda: self._is_woken or self._is_closing, tick)
                self._changed.wait_for(lambda: self._is_closing, _GATHER_S)
                self._is_woken = False
        self._try(self._finish)
        if self._session is not None:
            self._try(partial(self._session.end, _JOIN_S))
        self._release_lost()

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except SHUTDOWN:
            raise
        except Damaged as error:
            _log.warning("damaged", "disk tier: the catalogue of %s is damaged and is made anew: %s", self._root, error)
            self._end_session()
            self._replace(error.generation)
        except Superseded as error:
            _log.warning("root", "disk tier: %s or its catalogue was removed or replaced: %s", self._root, error)
            self._end_session()
        except BaseException as error:
            self._must_ask_room = True
            _log.warning("bookkeeper", "disk tier: %s has to wait: %r", self._root, error)

    def _replace(self, generation: int) -> None:
        try:
            replace_damaged(lock_directory(self._root), generation)
        except CatalogueError as error:
            _log.warning("replace", "disk tier: no new catalogue can be made in %s now: %s", self._root, error)

    def _turn(self) -> None:
        while self._retired:
            self._retired.popleft().clear()
        session = self._open_session()
        if (damage := session.recovery.damage) is not None:
            raise damage
        session.catalogue.check_membership()
        if not is_marked(self._root):  # while it is not, no store can make a directory
            open_with_locks(self._device, self._root)
        try:
            self._work_off(session)
            self._make_room(session)
        except Unavailable:
            self.num_evicted += session.evictor.unlink_unrecorded(session.served)
            raise
        if session.follower.follow():
            self._wake()
        else:
            session.committer.forget()
        self._manifests.describe(session.served.namespace)
        self._write_learned(session.served.namespace)

    def _work_off(self, session: _Session) -> None:
        """What the scheduler has decided. It waits for a rebuild, which has yet to see what lies there."""
        session.evictor.record(session.served)
        if self._must_ask_room:
            with self._room.settling:
                self._room.set_granted(session.catalogue.give_back(0))
            self._must_ask_room = False
        if not session.catalogue.totals().is_complete:
            return
        if self._room.available < 0:  # stores have outlived the catalogue that granted their bytes
            self._make_room(session)
        session.remover.finish()
        session.committer.carry_out(self._steps)
        if used := {self._used.popleft() for _ in range(len(self._used))}:
            session.catalogue.touch(used, int(time.time()))
        self._publish(session)

    def _publish(self, session: _Session) -> None:
        """A part of the last ranking, so that nothing else has to wait for all of it."""
        if self._rankings:
            self._publishing = self._rankings.popleft()
        if self._publishing is None or self._publishing.served is not session.served:
            return
        if part := list(islice(self._publishing.scores, _SCORES_A_TURN)):
            session.catalogue.publish_scores(part, int(time.time()) + _SCORES_HOLD_S)
        if len(part) == _SCORES_A_TURN:
            self._wake()
        else:
            self._publishing = None

    def _write_learned(self, namespace: DiskNamespace) -> None:
        learned, self._learned = self._learned, None
        if learned is not None:
            write_learned(self._device, self._root, namespace.attention, learned)

    def _make_room(self, session: _Session) -> None:
        num_evicted, is_short = session.evictor.make_room(session.served)
        self.num_evicted += num_evicted
        if is_short:
            self._wake()
        elif session.evictor.has_evicted_others:
            session.evictor.has_evicted_others = False
            session.recovery.look_for_abandoned()

    def _move(self, served: ServedNamespace) -> None:
        """Serve this namespace, and no more the one before, of which the catalogue knows all by now."""
        session = self._session
        if session is not None and session.served is not served:
            session.catalogue.serve(_namespaces_of(served.namespace), int(time.time()))
            session.served = served
            session.follower = Follower(session.catalogue, served, self._world_size)
            session.recovery.look_for_abandoned()

    def _open_session(self) -> _Session:
        """The catalogue of the root that is there now, in which this process is a member that serves."""
        if self._session is None:
            self._session = self._begin_session(self._served)
        return self._session

    def _begin_session(self, served: ServedNamespace) -> _Session:
        open_with_locks(self._device, self._root)
        require_marker(self._root)  # a full disk takes none
        catalogue = Catalogue(lock_directory(self._root))
        namespaces = _namespaces_of(served.namespace)
        try:
            catalogue.join(namespaces, int(time.time()))
        except BaseException:
            catalogue.close()
            raise
        self._release_lost()
        self._room.set_granted(0)
        remover = Remover(catalogue, self._root, self._device, UNLINK_THREADS)
        return _Session(
            catalogue,
            served,
            remover,
            Committer(catalogue, remover, self._room, self._stuck, self._removed, self._move),
            Evictor(catalogue, remover, self._room, self._quota, self._root, self._device),
            Follower(catalogue, served, self._world_size),
            Recovery(
                catalogue,
                self._root,
                namespaces,
                self._room,
                self._quota.capacity_bytes // 2,
                self.take_for_orphan,
                self._device,
                self._integrity,
            ),
        )

    def _end_session(self) -> None:
        session, self._session = self._session, None
        self._room.set_granted(0)
        if session is not None:
            self._try(partial(self._lose, session))

    def _lose(self, session: _Session) -> None:
        session.recovery.close(0.0)
        self._release_lost()
        self._lost_member = session.catalogue.close_file()

    def _release_lost(self) -> None:
        if self._lost_member is not None:
            self._lost_member.release()
            self._lost_member = None

    def _finish(self) -> None:
        """A last turn, without new room."""
        if (session := self._session) is None:
            return
        session.recovery.close(0.0)
        self._work_off(session)
        self._manifests.describe(session.served.namespace, is_last=True)
        self._write_learned(session.served.namespace)
        if self._room.in_flight <= 0:  # else whoever buries this process looks for what its stores leave
            session.catalogue.serve([], int(time.time()))
        if session.served.namespace.is_temporary:
            remove_abandoned(session.catalogue, session.remover, self._root, self._device)
        session.catalogue.leave(max(0, self._room.in_flight))


def _namespaces_of(namespace: DiskNamespace) -> list[Namespace]:
    return [Namespace(each, namespace.attention, namespace.is_temporary) for each in namespace.fingerprints]


def _scores_of(namespace: DiskNamespace, ranking: Sequence[Ranked], to_epoch_s: float) -> Iterator[Scored]:
    for item in times_of(ranking, to_epoch_s):
        name = Name(namespace.fingerprint_of(item.object_id.tag), item.object_id)
        yield Scored(name, item.evict_as, item.until + LATE_S)
