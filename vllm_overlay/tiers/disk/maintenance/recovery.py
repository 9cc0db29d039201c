# SPDX-License-Identifier: Apache-2.0
"""The thread that looks after what no living process does: a lost catalogue, dead processes, abandoned namespaces."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from vllm_overlay.common.backoff import Backoff
from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.tiers.disk.catalogue import Catalogue, CatalogueError, Damaged, DeadMember, Namespace
from vllm_overlay.tiers.disk.catalogue.room import Room
from vllm_overlay.tiers.disk.files.checksum import Integrity
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.manifest import manifest_or_empty
from vllm_overlay.tiers.disk.files.marker import require_marker
from vllm_overlay.tiers.disk.files.object_file import HeaderReader, header_reader, read_unverified
from vllm_overlay.tiers.disk.files.scan import (
    ORPHAN_AGE_S,
    namespaces_under,
    sweep_temporaries,
    unlink_if_same,
    was_written_before,
)
from vllm_overlay.tiers.disk.maintenance.abandoned import remove_abandoned
from vllm_overlay.tiers.disk.maintenance.header_scan import HeaderScan
from vllm_overlay.tiers.disk.maintenance.orphans import Age, Orphans
from vllm_overlay.tiers.disk.maintenance.rebuild import Rebuild
from vllm_overlay.tiers.disk.maintenance.remover import Remover

PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0
DEATH_SETTLES_S = 3.0
"""How long the workers of a killed engine may go on writing."""
_CLOCK_TICK_S = 0.05
_RETRY_S = 0.2
_SHOWN_OTHERS = 5
logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)


class Recovery:
    """One for each open catalogue, with one thread. It never keeps the bookkeeper waiting for longer than a
    transaction."""

    def __init__(
        self,
        catalogue: Catalogue,
        root: str,
        served: Sequence[Namespace],
        room: Room,
        most_bytes: int,
        take: Callable[[int], bool],
        device: Device,
        integrity: Integrity,
    ) -> None:
        """``most_bytes`` and ``take`` are for ``Orphans``."""
        self._catalogue = catalogue
        self._root = root
        self._own = {namespace.fingerprint: namespace for namespace in served}
        self._device = device
        self._remover = Remover(catalogue, root, device)
        self._scan = HeaderScan(root, device, self._is_closing)
        self._orphans = Orphans(
            catalogue, root, self._scan, device, room, most_bytes, take, self._remover, self._is_closing
        )
        self._own_readers = [header_reader(integrity)]
        self._readers = [read_unverified]
        """For other namespaces, whose keys this process may not have. It only counts and removes their files."""
        self._started = time.time()
        self._joined = time.monotonic()
        self._deaths: dict[tuple[int, int], float] = {}
        self._unclean: set[str] = set()
        """Namespaces in which something is left that time may settle."""
        self._pauses = Backoff(PAUSE_S, LONGEST_PAUSE_S)
        self._must_remove_abandoned = False
        self._closing = False
        self._woken = threading.Event()
        self.damage: Damaged | None = None
        """What is wrong with the catalogue. Nothing more is done then."""
        self._thread = threading.Thread(target=self._run, name="disk-recovery", daemon=True)
        self._thread.start()

    def look_for_abandoned(self) -> None:
        """A namespace is not served any more. Never waits."""
        self._must_remove_abandoned = True
        self._woken.set()

    def close(self, timeout_s: float) -> None:
        """End the thread, and wait for its end no longer than ``timeout_s``."""
        self._closing = True
        self._woken.set()
        self._thread.join(timeout_s)

    def _is_closing(self) -> bool:
        return self._closing

    def _run(self) -> None:
        todo = [self._rebuild, self._look_around]
        while not self._is_closing():
            step = todo[0] if todo else self._look_after_dead
            is_done = self._try(step)
            if is_done and todo:
                todo.pop(0)
            else:
                self._woken.wait(_RETRY_S if self._is_settling() or not is_done else PAUSE_S)
                self._woken.clear()

    def _is_settling(self) -> bool:
        """Whether somebody can be buried soon. Who could not be is tried again after a pause, because each try reads
        all of a namespace's directories."""
        moments = [*self._deaths.values(), *([self._joined] if self._must_remove_abandoned else [])]
        return any(time.monotonic() - moment < DEATH_SETTLES_S for moment in moments)

    def _try(self, step: Callable[[], bool]) -> bool:
        try:
            return step()
        except SHUTDOWN:
            raise
        except Damaged as error:
            self.damage = error
            self._closing = True
        except (CatalogueError, OSError) as error:
            if not self._is_closing():
                _log.warning("recovery", "disk tier: recovery of %s has to wait: %s", self._root, error)
        except BaseException as error:
            if not self._is_closing():
                _log.warning("defect", "disk tier: recovery of %s failed: %r", self._root, error)
        return False

    # Steps. Each says whether it is done.

    def _rebuild(self) -> bool:
        if self._catalogue.totals().is_complete:
            return True
        if not self._catalogue.begin_rebuild():
            return False  # another process does it
        useless = Rebuild(self._catalogue, self._root, self._scan, self._own).run(self._own_readers, self._readers)
        if self._is_closing():
            return False
        self._catalogue.end_rebuild()
        age = self._age()
        for file in useless:
            if was_written_before(file, age.written_before) and not self._is_closing():
                unlink_if_same(self._device, file)
        return True

    def _look_around(self) -> bool:
        """Looks once at everything under the root."""
        sweep_temporaries(self._root, self._device)
        self._tell_of_others()
        self._must_remove_abandoned = True
        self._unclean = set(namespaces_under(self._root))
        self._look_again(time.monotonic())
        return self._look_after_dead()

    def _look_again(self, now: float) -> None:
        """Looks again at what is young, cannot be read now or finds no room. Time may help."""
        if not self._unclean or not self._pauses.may_try(now):
            return
        is_clean = self._look_after(sorted(self._unclean.intersection(namespaces_under(self._root))))
        (self._pauses.succeeded if is_clean else self._pauses.failed)(now)
        if is_clean:
            self._unclean = set()

    def _look_after_dead(self) -> bool:
        """Adopt or remove what ended processes left, and forget them."""
        dead = self._catalogue.dead_members()
        now = time.monotonic()
        self._deaths = {(member.slot, member.pid): self._deaths.get((member.slot, member.pid), now) for member in dead}
        self._remover.finish()
        for member in dead:
            if now - self._deaths[member.slot, member.pid] >= DEATH_SETTLES_S and not self._is_closing():
                self._bury(member)
        self._look_again(now)
        if (dead or self._must_remove_abandoned) and self._knows_who_serves():
            remove_abandoned(self._catalogue, self._remover, self._root, self._device)
            self._must_remove_abandoned = False
        return True

    def _knows_who_serves(self) -> bool:
        """Whether every living process has joined. After a catalogue was replaced each has to do so again."""
        is_settled = time.monotonic() - self._joined >= DEATH_SETTLES_S
        if not is_settled:
            return False
        num_living = self._catalogue.count_living()
        num_dead = len(self._catalogue.dead_members())  # they are members until they are buried
        return num_living <= self._catalogue.totals().num_members - num_dead

    def _bury(self, member: DeadMember) -> None:
        self._remover.finish(self._catalogue.inherit(member.slot))
        if self._look_after(member.fingerprints):
            self._forget_missing()
            self._catalogue.bury(member.slot)

    def _forget_missing(self) -> None:
        """Removes rows whose files are gone. On a full disk a process unlinks files whose rows it could not take
        away."""
        require_marker(self._root)  # else all would be missing
        _, slices = self._catalogue.load(known.fingerprint for known in self._catalogue.namespaces())
        for found in slices:
            for item in found:
                if not self._is_closing() and not self._remover.is_there(item):
                    self._remover.remove([item.name])

    def _look_after(self, fingerprints: Sequence[str]) -> bool:
        """Settles namespaces, those in which parents lie first. Returns False while something is left that time may
        settle."""
        known = {namespace.fingerprint: namespace for namespace in self._catalogue.namespaces()}
        unknown = [self._namespace_of(fingerprint) for fingerprint in fingerprints if fingerprint not in known]
        if unknown:
            self._catalogue.tell_of(unknown, int(time.time()))
            known = {namespace.fingerprint: namespace for namespace in self._catalogue.namespaces()}
        is_clean = True
        for fingerprint in sorted(fingerprints, key=lambda fingerprint: known[fingerprint].partner != fingerprint):
            if self._is_closing():
                return False
            namespace = known[fingerprint]
            if namespace.is_temporary and not namespace.is_served:
                if self._knows_who_serves():
                    self._orphans.remove(fingerprint, self._age())
                else:
                    is_clean = False
                continue
            readers: Sequence[HeaderReader] = self._own_readers if fingerprint in self._own else self._readers
            is_clean &= self._orphans.look_after(fingerprint, namespace.partner, readers, self._age())
        return is_clean

    def _namespace_of(self, fingerprint: str) -> Namespace:
        """One that somebody put here while no process looked."""
        manifest = manifest_or_empty(os.path.join(self._root, fingerprint))
        return Namespace(fingerprint, manifest.attention or fingerprint, is_temporary=manifest.is_of_one_process)

    def _age(self) -> Age:
        is_alone = self._catalogue.count_living() == 1
        old = time.time() - ORPHAN_AGE_S
        return Age(max(old, self._started - _CLOCK_TICK_S) if is_alone else old, is_alone)

    def _tell_of_others(self) -> None:
        """Logs what else takes room in the root that was opened."""
        others = [usage for usage in self._catalogue.usage() if usage.fingerprint not in self._own and usage.num_bytes]
        if others and not self._is_closing():
            shown = ", ".join(
                f"{item.num_bytes} bytes of model {self._model_of(item.fingerprint)!r} "
                f"({'served' if item.is_served else 'idle'})"
                for item in others[:_SHOWN_OTHERS]
            )
            logger.info(
                "disk tier: %d other namespaces of %d bytes lie under %s: %s%s",
                len(others), sum(item.num_bytes for item in others), self._root, shown,
                ", ..." if len(others) > _SHOWN_OTHERS else "",
            )  # fmt: skip

    def _model_of(self, fingerprint: str) -> str:
        return manifest_or_empty(os.path.join(self._root, fingerprint)).model or "?"
