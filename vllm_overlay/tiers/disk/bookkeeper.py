# SPDX-License-Identifier: Apache-2.0
"""The thread between one scheduler and the catalogue of its root: everything that may wait for the disk."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk import catalogue
from vllm_overlay.tiers.disk.catalogue import Scored
from vllm_overlay.tiers.disk.evictor import is_full
from vllm_overlay.tiers.disk.files.lease import Lease
from vllm_overlay.tiers.disk.files.root import reopen_root
from vllm_overlay.tiers.disk.files.writer import Life, begin_life
from vllm_overlay.tiers.disk.messages import ServedNamespace, Step, Store
from vllm_overlay.tiers.disk.ranking import encode_learned, times_of
from vllm_overlay.tiers.disk.room import Room
from vllm_overlay.tiers.disk.session import Session
from vllm_overlay.tiers.disk.site import Site
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.policies.base import Ranked
from vllm_overlay.tiers.policies.reuse import Learned

TICK_S = 0.5
_FIRST_TICKS_S = 0.05
"""A pause until all objects are known."""
_GATHER_S = 0.02
"""So long the thread waits for more to do, once it was woken: one transaction takes many objects."""
_JOIN_S = 1.0
REOPEN_S = 5.0
"""After so long without an answer the catalogue is opened anew: a server that was away has forgotten open files."""
_MOST_USED = 1 << 16
_SCORES_A_TURN = 4096
_SCORES_HOLD_S = 300
"""A few rankings' time. Of a process that ranks no more, what is worth little goes early for no longer."""
LATE_S = 5.0
"""So much later than a use the catalogue may hear of it: this process's own use is no other's."""
_log = RateLimitedLog(logging.getLogger(__name__))


class Bookkeeper:
    """One a DiskTierManager. Public methods are called from the scheduler's thread and never wait for the disk.

    Whatever goes wrong is logged and tried again soon. Meanwhile there is no new room, and what was found
    can be loaded.
    """

    def __init__(self, site: Site, served: ServedNamespace, lease: Lease | None) -> None:
        self._site, self._root = site, site.root
        self._served = served
        self._lease = lease
        self._room = Room()
        self._steps: deque[Step] = deque()
        self._stuck: list[Store] = []
        self._used: deque[tuple[ServedNamespace, ObjectId]] = deque(maxlen=_MOST_USED)
        self._rankings: deque[tuple[ServedNamespace, Sequence[Ranked]]] = deque(maxlen=1)
        self._publishing: tuple[ServedNamespace, Iterator[Scored]] | None = None
        self._learned: Learned | None = None
        self._retired: deque[PrefixIndex] = deque()
        self._session: Session | None = None
        self._life: Life | None = None
        """This engine's writer, also while no catalogue is open."""
        self._must_ask_room = False
        self._answered_at = time.monotonic()
        self._changed = threading.Condition()
        self._is_woken = self._is_closing = False
        self._num_turns = 0
        self.num_evicted = 0
        """Objects that this process has evicted, of whatever namespace."""
        self.usable_bytes = site.quota.capacity_bytes
        """What all objects of the root may take now; 0 while there is no root to work in."""
        self._thread = threading.Thread(target=self._run, name="disk-bookkeeper", daemon=True)
        self._thread.start()

    # From the scheduler's thread.

    def reserve(self, num_bytes: int) -> str:
        """Take bytes for all ranks' files of an object; returns whose file it is to be. Empty when there is no room
        now."""
        writer = self._room.reserve(num_bytes)
        if not writer or self._room.available < self._room.in_flight:
            self._wake()
        return writer

    def expect_stores(self) -> None:
        """A request has come: there is to be room for what it computes."""
        if not self._room.is_wanted:
            self._room.is_wanted = True
            self._wake()

    def end(self, store: Store) -> None:
        """Every rank has stored an object or, where it is not wanted, no rank writes it any more."""
        self._steps.append(store)
        self._wake()

    def use(self, served: ServedNamespace, object_ids: Iterable[ObjectId]) -> None:
        """These are used now: they go late."""
        self._used.extend((served, object_id) for object_id in object_ids)

    def rank(self, served: ServedNamespace, ranking: Sequence[Ranked]) -> None:
        """From now on evict in this order. The ranking's clock is the monotonic one."""
        self._rankings.append((served, ranking))

    def keep(self, learned: Learned) -> None:
        """Write it down soon, or at the end: for the next start of this namespace."""
        self._learned = learned

    def serve(self, served: ServedNamespace, retired: PrefixIndex) -> None:
        """Serve this namespace from now on, and the one before no more, whose index takes long to take apart."""
        self._served = served
        self._retired.append(retired)
        self._steps.append(served)
        self._wake()

    def close(self, timeout_s: float) -> None:
        """Finish what is queued, give the room back but for stores still under way, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _wake(self) -> None:
        if not self._is_woken:
            with self._changed:
                self._is_woken = True
                self._changed.notify()

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
            self._session.close(_JOIN_S)
        if self._life is not None:
            self._life.end()
        if self._lease is not None:
            self._try(self._lease.release)

    def _try(self, step: Callable[[], None]) -> None:
        path = self._root.path
        try:
            step()
            self._answered_at = time.monotonic()
        except SHUTDOWN:
            raise
        except catalogue.Damaged as error:
            _log.warning("damaged", "disk tier: the catalogue of %s is damaged and is made anew: %s", path, error)
            self._end_session()
            try:
                catalogue.replace_damaged(path, error.generation, self._root.journal)
            except catalogue.CatalogueError as trouble:
                _log.warning("replace", "disk tier: no new catalogue can be made in %s now: %s", path, trouble)
        except catalogue.Superseded as error:
            sentence = "disk tier: %s or its catalogue was removed or replaced, and begins anew with what is left: %s"
            _log.warning("root", sentence, path, error)
            self._end_session()
        except BaseException as error:
            self._must_ask_room = True
            if self._session is None:
                self.usable_bytes = 0
            _log.warning("bookkeeper", "disk tier: %s has to wait: %r", path, error)
            if not isinstance(error, catalogue.Busy) and time.monotonic() - self._answered_at > REOPEN_S:
                self._answered_at = time.monotonic()
                with contextlib.suppress(OSError):
                    if is_full(self._site):  # only an open session knows what to unlink, and a new one could not join
                        return
                self._end_session()

    def _turn(self) -> None:
        while self._retired:
            self._retired.popleft().clear()
        if self._lease is not None:
            try:
                self._lease.renew()
            except OSError:  # nothing is stored: another machine may be at work here
                self._end_session()
                raise
        if (session := self._session) is None:
            reopen_root(self._site.device, self._root)
            session = self._session = Session(self._site, self._served, self._room, self._living())
        session.check()
        try:
            self._work_off(session)
            num_evicted, is_short = session.make_room()
        except catalogue.Unavailable:
            self.num_evicted += session.evictor.unlink_ahead(session.served, session.now)
            raise
        self.num_evicted += num_evicted
        self.usable_bytes = session.evictor.usable_bytes
        if session.follower.follow(session.is_complete) or is_short:
            self._wake()
        self._keep_learned(session)

    def _living(self) -> Life:
        """This engine's writer, and a new one only when others do not see any more that it lives. Raises OSError."""
        before = self._life
        if before is not None and before.is_in_place():
            return before
        life = self._life = begin_life(self._root.path, self._site.device)
        if before is not None:
            before.end()
        return life

    def _work_off(self, session: Session) -> None:
        if self._must_ask_room:
            self._room.set_granted(session.catalogue.give_back(session.writer, 0))
            self._must_ask_room = False
        if not session.work_off(self._steps, self._stuck):
            return
        if used := {self._used.popleft() for _ in range(len(self._used))}:
            namespace = session.served.namespace
            names = [namespace.stored_id(object_id) for served, object_id in used if served is session.served]
            session.catalogue.touch(namespace.fingerprint, names, session.now)
        self._publish(session)

    def _publish(self, session: Session) -> None:
        """A part of the last ranking, so that nothing else has to wait for all of it."""
        if self._rankings:
            served, ranking = self._rankings.popleft()
            self._publishing = served, times_of(ranking, session.to_epoch_s)
        if self._publishing is None or self._publishing[0] is not session.served:
            return
        namespace = session.served.namespace
        part = [
            Scored(namespace.stored_id(item.object_id), item.score, item.until + LATE_S)
            for item in islice(self._publishing[1], _SCORES_A_TURN)
        ]
        session.catalogue.publish_scores(namespace.fingerprint, part, session.now + _SCORES_HOLD_S)
        if len(part) == _SCORES_A_TURN:
            self._wake()
        else:
            self._publishing = None

    def _keep_learned(self, session: Session) -> None:
        learned, self._learned = self._learned, None
        if learned is not None:
            session.catalogue.keep_learned(session.served.namespace.fingerprint, encode_learned(learned))

    def _end_session(self) -> None:
        session, self._session = self._session, None
        self._room.set_granted(0)
        if session is not None:
            session.close()

    def _finish(self) -> None:
        """A last turn, without new room."""
        if (session := self._session) is not None:
            session.recovery.close(0.0)
            self._work_off(session)
            self._keep_learned(session)
            session.leave()
