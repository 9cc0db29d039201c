# SPDX-License-Identifier: Apache-2.0
"""One open catalogue of a root, and everything that works on it for one engine."""

import time
from collections import deque

from vllm_overlay.tiers.disk.catalogue import Catalogue, Namespace, Superseded
from vllm_overlay.tiers.disk.committer import Committer
from vllm_overlay.tiers.disk.evictor import Evictor
from vllm_overlay.tiers.disk.files.root import is_in_place, reopen_root
from vllm_overlay.tiers.disk.files.writer import Life, begin_life
from vllm_overlay.tiers.disk.follower import Follower
from vllm_overlay.tiers.disk.messages import Discarded, ServedNamespace, Step
from vllm_overlay.tiers.disk.recovery.recovery import Recovery
from vllm_overlay.tiers.disk.room import Room
from vllm_overlay.tiers.disk.site import Seat, Site
from vllm_overlay.tiers.disk.unlinker import Unlinker


class Session:
    """Called in the bookkeeper's thread. Every call raises CatalogueError and OSError.

    ``life`` is this engine's writer of before. It stays the writer while others see that it lives.
    """

    def __init__(self, site: Site, served: ServedNamespace, room: Room, life: Life | None) -> None:
        root = site.root
        reopen_root(site.device, root)
        self._site = site
        self._room = room
        self.served = served
        self.catalogue = Catalogue(root.path, root.journal)
        try:
            if life is None or not life.is_in_place():
                life = begin_life(root.path, site.device)
            self.life = life
            self.catalogue.join(self.writer, namespace_of(served))
            granted = self.catalogue.give_back(self.writer, 0)
            newest_use = self.catalogue.totals().newest_use
        except BaseException:
            self.catalogue.close()
            raise
        room.begin(self.writer, granted)
        self.to_epoch_s = max(time.time(), float(newest_use)) - time.monotonic()
        """Turns monotonic seconds into those since the epoch: a clock that is set back makes nothing old."""
        seat = Seat(site, self.catalogue, self.writer)
        self.unlinker = Unlinker(seat)
        self.committer = Committer(seat, self.unlinker, room, self._move)
        self.evictor = Evictor(seat, self.unlinker, room)
        self.follower = Follower(self.catalogue, served, site.world_size)
        self.recovery = Recovery(seat, served.namespace.fingerprint)

    @property
    def writer(self) -> str:
        return self.life.writer

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
        if not self.life.is_in_place():
            raise Superseded(f"the lock of writer {self.writer} was removed")

    def work_off(self, steps: deque[Step], stuck: list[Discarded]) -> bool:
        """What the scheduler has decided. It waits for a rebuild, which has yet to see what lies there: False then."""
        totals = self.catalogue.totals()
        if not totals.is_complete:
            return False
        if self._room.available < 0:  # stores have outlived the catalogue that granted their bytes
            self.make_room()
        if totals.removing_bytes or self.unlinker.num_stuck:
            self.unlinker.run()
        self.committer.carry_out(steps, stuck, self.now)
        return True

    def make_room(self) -> tuple[int, bool]:
        """See ``Evictor.make_room``."""
        return self.evictor.make_room(self.served, self.now, self.recovery.has_buried)

    def _move(self, served: ServedNamespace) -> None:
        """Serve this namespace, and no more the one before, of which the catalogue knows all by now."""
        if self.served is not served:
            self.catalogue.serve(self.writer, namespace_of(served))
            self.served = served
            self.follower = Follower(self.catalogue, served, self._site.world_size)

    def leave(self) -> None:
        """What stores that are still under way leave is looked after by who buries the writer."""
        self.recovery.close(0.0)
        self.catalogue.leave(self.writer, max(0, self._room.in_flight))

    def close(self, timeout_s: float = 0.0) -> None:
        self.recovery.close(timeout_s)
        self.catalogue.close()


def namespace_of(served: ServedNamespace) -> Namespace:
    """What the catalogue knows of a namespace."""
    namespace = served.namespace
    return Namespace(namespace.fingerprint, namespace.words, namespace.is_private)
