# SPDX-License-Identifier: Apache-2.0
"""The scan at start: which objects of a namespace are whole and can be reached."""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.format import Identity
from vllm_overlay.tiers.disk.integrity import XXH3, Integrity
from vllm_overlay.tiers.disk.io import Device
from vllm_overlay.tiers.disk.log import RateLimitedLog
from vllm_overlay.tiers.disk.namespace import DiskNamespace, parse_file_name
from vllm_overlay.tiers.disk.objectfile import BadObject, read_header
from vllm_overlay.tiers.disk.reclaim import Janitor
from vllm_overlay.tiers.disk.scan import ORPHAN_AGE_S, FoundFile, scan_namespace
from vllm_overlay.tiers.disk.summary import summarize

_PROGRESS_S = 10.0
_CLOCK_TICK_S = 0.05
_SHOWN_OTHERS = 5
logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)


@dataclass(frozen=True, slots=True)
class FoundObject:
    """An object whose ranks' files all say the same. ``mtime`` is the youngest file's."""

    planned: PlannedObject
    mtime: float
    files: tuple[FoundFile, ...]


def parents_first(found: Iterable[FoundObject]) -> tuple[list[FoundObject], list[FoundObject]]:
    """The objects that can be reached, each after its parents and else the oldest first; and those that cannot."""
    by_id = {item.planned.object_id: item for item in found}
    is_reachable: dict[ObjectId, bool] = {}
    opened: set[ObjectId] = set()
    order: list[FoundObject] = []
    for first in sorted(by_id.values(), key=lambda item: item.mtime):
        path = [first]
        while path:
            item = path[-1]
            object_id, parents = item.planned.object_id, item.planned.parents
            if object_id not in opened:
                opened.add(object_id)
                path += [by_id[parent] for parent in parents if parent in by_id and parent not in opened]
                continue
            path.pop()
            if object_id not in is_reachable:
                is_reachable[object_id] = all(is_reachable.get(parent, False) for parent in parents)
                order.append(item)
    return (
        [item for item in order if is_reachable[item.planned.object_id]],
        [item for item in order if not is_reachable[item.planned.object_id]],
    )


class Recovery:
    """Scans in a thread of its own while the tier already serves; the scheduler takes what it found in slices.

    Files that no object needs are handed to the janitor, but not those that may be on their way: files younger than
    this scan, and those younger than an hour while other processes use the root.
    """

    def __init__(
        self,
        root: str,
        namespace: DiskNamespace,
        world_size: int,
        janitor: Janitor,
        device: Device,
        integrity: Integrity = XXH3,
    ) -> None:
        self._root = root
        self._namespace = namespace
        self._world_size = world_size
        self._janitor = janitor
        self._device = device
        self._integrity = integrity
        self._started = time.time()
        self._lock = threading.Lock()
        self._found: deque[PlannedObject] = deque()
        self._is_scanning = True
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="disk-recovery", daemon=True)
        self._thread.start()

    # From the scheduler's thread.

    @property
    def is_done(self) -> bool:
        """Whether everything found has been taken."""
        return not self._is_scanning and not self._found

    def take(self, count: int) -> list[PlannedObject]:
        """At most ``count`` found objects, each after its parents."""
        return [self._found.popleft() for _ in range(min(count, len(self._found)))]

    def stop(self) -> None:
        """What was found and not taken is of no use any more, nor what is found from now on. Never waits."""
        with self._lock:
            self._is_closing = True
            self._found.clear()

    def close(self, timeout_s: float) -> None:
        """End the scan."""
        self.stop()
        self._thread.join(timeout_s)

    # In the recovery thread.

    def _run(self) -> None:
        try:
            self._recover()
        except Exception as error:
            logger.warning("disk tier: recovery of %s stopped: %r", self._root, error)
        finally:
            self._is_scanning = False

    def _recover(self) -> None:
        found, useless = self._scan()
        reachable, unreachable = parents_first(found)
        useless += [file for item in unreachable for file in item.files]
        with self._lock:
            if self._is_closing:
                return
            self._found.extend(item.planned for item in reachable)
        num_bytes = sum(file.num_bytes for item in reachable for file in item.files)
        seconds = time.time() - self._started
        logger.info(
            "disk tier: recovered %d objects (%d bytes) under %s in %.1f s; %d files belong to none",
            len(reachable), num_bytes, self._root, seconds, len(useless),
        )  # fmt: skip
        self._tell_of_others()
        self._discard(useless)

    def _tell_of_others(self) -> None:
        """Whoever opens a root learns what else takes its room."""
        others = [item for item in summarize(self._root) if item.fingerprint not in self._namespace.fingerprints]
        if others and not self._is_closing:
            shown = ", ".join(
                f"{item.num_bytes} bytes of model {item.model or '?'!r} ({'served' if item.is_in_use else 'idle'})"
                for item in others[:_SHOWN_OTHERS]
            )
            logger.info(
                "disk tier: %d other namespaces of %d bytes lie under %s: %s%s",
                len(others), sum(item.num_bytes for item in others), self._root, shown,
                ", ..." if len(others) > _SHOWN_OTHERS else "",
            )  # fmt: skip

    def _discard(self, files: list[FoundFile]) -> None:
        if files and not self._is_closing:
            youngest = self._started - (_CLOCK_TICK_S if self._janitor.is_alone() else ORPHAN_AGE_S)
            self._janitor.remove_paths([file.path for file in files if file.mtime < youngest])

    def _scan(self) -> tuple[list[FoundObject], list[FoundFile]]:
        """Whole objects, and the files of those that are not."""
        by_object, useless = self._sort_files()
        objects: list[FoundObject] = []
        logged = time.monotonic()
        for object_id, files in by_object.items():
            if self._is_closing:
                return [], []
            try:
                objects.append(self._read(object_id, files))
            except BadObject as bad:
                _log.warning(bad.reason, "disk tier: not recovered (%s): %s", bad.reason, files[0].path)
                useless += files if bad.is_bad else ()
            if time.monotonic() - logged > _PROGRESS_S:
                logged = time.monotonic()
                logger.info("disk tier: recovering, %d of %d objects so far", len(objects), len(by_object))
        return objects, useless

    def _sort_files(self) -> tuple[dict[ObjectId, list[FoundFile]], list[FoundFile]]:
        """The files in their places, by object, and those that have an object's name in another place."""
        by_object: defaultdict[ObjectId, list[FoundFile]] = defaultdict(list)
        useless = []
        for fingerprint in self._namespace.fingerprints:
            for file in scan_namespace(self._root, fingerprint):
                if self._is_closing or (parsed := parse_file_name(file.name)) is None:
                    continue
                object_id, rank = parsed
                if rank < self._world_size and file.path == self._namespace.path_of(self._root, object_id, rank):
                    by_object[object_id].append(file)
                else:
                    useless.append(file)
        return by_object, useless

    def _read(self, object_id: ObjectId, files: list[FoundFile]) -> FoundObject:
        planned = read_planned(self._device, self._root, self._namespace, self._world_size, object_id, self._integrity)
        return FoundObject(planned, max(file.mtime for file in files), tuple(files))


def read_planned(
    device: Device,
    root: str,
    namespace: DiskNamespace,
    world_size: int,
    object_id: ObjectId,
    integrity: Integrity = XXH3,
) -> PlannedObject:
    """What the headers of an object say. Raises BadObject unless every rank has a sound file and all say the same."""
    fingerprint = bytes.fromhex(namespace.fingerprint_of(object_id.kind))
    found: PlannedObject | None = None
    for rank in range(world_size):
        header = read_header(device, namespace.path_of(root, object_id, rank), integrity)
        if header.identity != Identity(fingerprint, object_id, rank, world_size, header.payload_bytes):
            raise BadObject("header")
        planned = header.planned
        if found not in (None, planned):
            raise BadObject("header")
        found = planned
    assert found is not None
    return found
