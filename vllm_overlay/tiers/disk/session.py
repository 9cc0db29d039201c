# SPDX-License-Identifier: Apache-2.0
"""One open catalogue of a root: tells it in order of what was stored, with all that works on it for one engine."""

import logging
import time
from collections import deque
from collections.abc import Sequence

from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.tiers.disk import catalogue
from vllm_overlay.tiers.disk.catalogue import BATCH_ROWS, Catalogue, Namespace, StoredObject, Superseded, Totals
from vllm_overlay.tiers.disk.evictor import Evictor, Unlinker
from vllm_overlay.tiers.disk.files.root import is_in_place
from vllm_overlay.tiers.disk.files.writer import MAX_NUMBER, Life
from vllm_overlay.tiers.disk.follower import Follower
from vllm_overlay.tiers.disk.messages import Committed, ServedNamespace, Step, Store
from vllm_overlay.tiers.disk.recovery.recovery import Recovery
from vllm_overlay.tiers.disk.room import Room
from vllm_overlay.tiers.disk.site import Seat, Site

_log = RateLimitedLog(logging.getLogger(__name__))


class Session:
    """Called in the bookkeeper's thread. Every call raises CatalogueError and OSError. ``life`` is the engine's
    writer."""

    def __init__(self, site: Site, served: ServedNamespace, room: Room, life: Life) -> None:
        self._site, self._room, self.served = site, room, served
        self._life, self.writer = life, life.writer
        self.is_complete = False
        """Whether the catalogue knew all files when ``work_off`` was called last."""
        self.catalogue = Catalogue(site.root.path, site.root.journal)
        try:
            room.begin(self.writer, self._join(served))
            self.to_epoch_s = time.time() - time.monotonic()
            """Turns monotonic seconds into those since the epoch. No engine is behind another one of its root, so a
            clock that is set makes nothing old."""
            self._keep_up(self.catalogue.totals())
            seat = Seat(site, self.catalogue, self.writer)
            self.unlinker = Unlinker(seat)
            self.evictor = Evictor(seat, self.unlinker, room)
            self.follower = Follower(self.catalogue, served, site.world_size)
            self.recovery = Recovery(seat, served.namespace.fingerprint)
            self.recovery.start()
        except BaseException:
            self.catalogue.close()
            raise

    def _join(self, served: ServedNamespace) -> int:
        """Returns what the writer was granted."""
        namespace = served.namespace
        row = Namespace(namespace.fingerprint, namespace.words, namespace.is_private)
        return self.catalogue.join(self.writer, row)

    def _keep_up(self, totals: Totals) -> None:
        self.to_epoch_s = max(self.to_epoch_s, totals.newest_use - time.monotonic())

    @property
    def now(self) -> int:
        """Seconds since the epoch, as the catalogue counts them."""
        return int(time.monotonic() + self.to_epoch_s)

    def check(self) -> None:
        """Raises Superseded when the root, or what others know this engine by, was removed; Damaged after a damage that
        the recovery has met."""
        if self.recovery.damage is not None:
            raise self.recovery.damage
        if not is_in_place(self._site.root):
            raise Superseded("it is not there, or on another disk")
        if not self._life.is_in_place():
            raise Superseded(f"the lock of writer {self.writer} was removed")

    def make_room(self) -> tuple[int, bool]:
        """See ``Evictor.make_room``."""
        return self.evictor.make_room(self.served, self.now, self.recovery.has_buried)

    def leave(self) -> None:
        """What stores that are still under way leave is looked after by who buries the writer."""
        self.recovery.close(0.0)
        self.catalogue.leave(self.writer, max(0, self._room.in_flight))

    def close(self, timeout_s: float = 0.0) -> None:
        self.recovery.close(timeout_s)
        self.catalogue.close()

    # What the scheduler has decided.

    def work_off(self, steps: deque[Step], stuck: list[Store]) -> bool:
        """Take away what is done, each step once; ``stuck`` has what could not be unlinked. Another thread may append
        to ``steps`` meanwhile. It waits for a rebuild, which has yet to see what lies there: False then."""
        totals = self.catalogue.totals()
        self._keep_up(totals)
        self.is_complete = bool(totals.is_complete)
        if not self.is_complete:
            return False
        if self._room.available < 0:  # stores have outlived the catalogue that granted their bytes
            self.make_room()
        if totals.removing_bytes or self.unlinker.num_stuck:
            self.unlinker.run()
        for store in tuple(stuck):
            if self._discard(store):
                stuck.remove(store)
        while steps:
            step = steps[0]
            if isinstance(step, ServedNamespace):
                self._move(step)
            elif step.is_wanted:
                self._commit(steps)
                continue
            elif not self._discard(step):
                stuck.append(step)
            steps.popleft()
        return True

    def _move(self, served: ServedNamespace) -> None:
        """Serve this namespace, and no more the one before, of which the catalogue knows all by now."""
        if self.served is not served:
            self._room.set_granted(self._join(served))
            self.served = served
            self.follower = Follower(self.catalogue, served, self._site.world_size)

    def _commit(self, steps: deque[Step]) -> None:
        """The stores at the front. Once the catalogue has answered, these steps are done. What is left of them becomes
        new steps."""
        stores: list[Store] = []
        for place in range(min(len(steps), BATCH_ROWS)):
            step = steps[place]
            if isinstance(step, ServedNamespace) or not step.is_wanted:
                break
            stores.append(step)
        left: list[Step] = []
        for store, answer in zip(stores, self._answers(stores), strict=True):
            steps.popleft()
            counts = None if answer is None or answer.file.number > MAX_NUMBER else answer.file
            store.served.updates.append(Committed(store.planned.object_id, store.file, counts))
            if counts != store.file:
                store.is_wanted = False
                left.append(store)
                continue
            self._room.release(store.num_bytes, is_paid=answer is not None and answer.is_paid)
            store.served.holds.release(store.parents)
        steps.extendleft(reversed(left))

    def _answers(self, stores: Sequence[Store]) -> list[catalogue.Committed | None]:
        """What the catalogue says of each. A writer that has ended meanwhile takes its stores along."""
        own = [store for store in stores if store.file.writer == self.writer]
        answers: dict[int, catalogue.Committed | None] = {}
        try:
            rows = [(self._row(store), store.replaces) for store in own]
            answers = dict(zip(map(id, own), self.catalogue.commit(self.writer, rows), strict=True))
        except ValueError as error:  # an object that no row can hold must not keep the others
            if len(stores) > 1:
                return [answer for store in stores for answer in self._answers([store])]
            _log.warning("row", "disk tier: an object cannot be kept: %s", error)
        return [answers.get(id(store)) for store in stores]

    def _row(self, store: Store) -> StoredObject:
        namespace, size = store.served.namespace, self._site.world_size
        planned = namespace.stored(store.planned)
        return StoredObject(namespace.fingerprint, planned, store.file, size, store.num_bytes, self.now)

    def _discard(self, store: Store) -> bool:
        """Whether its files are gone, or named after all: a rebuild may have found them. If not, its bytes stay
        taken."""
        if not self.catalogue.named([store.file]) and not self.unlinker.unlink(store.file, self._site.world_size):
            return False
        self._room.release(store.num_bytes)
        store.served.holds.release(store.parents)
        return True
