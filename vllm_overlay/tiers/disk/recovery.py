# SPDX-License-Identifier: Apache-2.0
"""The scan at start: which objects of a namespace are whole and can be reached."""

import logging
import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.checksum import XXH3, Integrity
from vllm_overlay.tiers.disk.device import Device
from vllm_overlay.tiers.disk.listing import FoundObject, parents_first, read_planned
from vllm_overlay.tiers.disk.namespace import DiskNamespace, parse_file_name
from vllm_overlay.tiers.disk.object_file import BadObject
from vllm_overlay.tiers.disk.ownership import shut_bits, why_not_ours
from vllm_overlay.tiers.disk.reclaimer import Reclaimer
from vllm_overlay.tiers.disk.scan import (
    ORPHAN_AGE_S,
    FoundFile,
    fan_out_directories,
    scan_directory,
    was_written_before,
)
from vllm_overlay.tiers.disk.thread_pool import ThreadPool
from vllm_overlay.tiers.disk.usage import measure_usage

_PROGRESS_S = 10.0
_READ_THREADS = 4
_CLOCK_TICK_S = 0.05
_SHOWN_OTHERS = 5
logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)


@dataclass(slots=True)
class _Part:
    """What some directories hold: whole objects, files of which no object can be made, and objects that could not be
    read now, though nothing is known to be wrong with them."""

    objects: list[FoundObject] = field(default_factory=list)
    useless: list[FoundFile] = field(default_factory=list)
    num_unread: int = 0

    def add(self, other: "_Part") -> None:
        self.objects.extend(other.objects)
        self.useless.extend(other.useless)
        self.num_unread += other.num_unread


class Recovery:
    """Scans in a thread of its own while the tier already serves; the scheduler takes what it found in slices.

    Files that no object needs are handed to the reclaimer, but not those that may be on their way: files younger than
    this scan, and those younger than an hour while other processes use the root. Where an object could not be read,
    it and what builds on it stay: lookups find them once it can be, and so does the next start.
    """

    def __init__(
        self,
        root: str,
        namespace: DiskNamespace,
        world_size: int,
        reclaimer: Reclaimer,
        device: Device,
        integrity: Integrity = XXH3,
    ) -> None:
        self._root = root
        self._namespace = namespace
        self._world_size = world_size
        self._reclaimer = reclaimer
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
        except SHUTDOWN:
            raise
        except BaseException as error:
            logger.warning("disk tier: recovery of %s stopped: %r", self._root, error)
        finally:
            self._is_scanning = False

    def _recover(self) -> None:
        found = self._scan()
        reachable, unreachable = parents_first(found.objects)
        useless = found.useless
        if not found.num_unread:
            useless += [file for item in unreachable for file in item.files]
        with self._lock:
            if self._is_closing:
                return
            self._found.extend(item.planned for item in reachable)
            self._is_scanning = False
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
        others = measure_usage(self._root, but=self._namespace.fingerprints)
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
            youngest = self._started - (_CLOCK_TICK_S if self._reclaimer.is_alone() else ORPHAN_AGE_S)
            self._reclaimer.remove_paths([file.path for file in files if was_written_before(file, youngest)])

    def _scan(self) -> _Part:
        """Whole objects, and the files of those that are not: several threads, each with a directory at a time."""
        directories = [
            directory
            for fingerprint in self._namespace.fingerprints
            for directory in fan_out_directories(self._root, fingerprint, is_strict=True)
        ]
        ours = [directory for directory in directories if self._is_ours(directory)]
        parts: queue.SimpleQueue[_Part | BaseException] = queue.SimpleQueue()
        pool = ThreadPool("disk-recovery-read", _READ_THREADS)
        for directory in ours:
            pool.submit(partial(self._scan_directory, directory, parts))
        all_parts = _Part(num_unread=len(directories) - len(ours))
        logged = time.monotonic()
        try:
            for number in range(1, 1 + len(ours)):
                part = parts.get()
                if isinstance(part, BaseException):
                    raise part
                all_parts.add(part)
                if time.monotonic() - logged > _PROGRESS_S and not self._is_closing:
                    logged = time.monotonic()
                    logger.info(
                        "disk tier: recovering, %d objects in %d of %d directories so far",
                        len(all_parts.objects), number, len(ours),
                    )  # fmt: skip
        finally:
            pool.stop(0.0)
        return all_parts

    def _is_ours(self, directory: str) -> bool:
        """Whether others could have put files into this directory of a namespace: then all in it is left alone."""
        shut = shut_bits(has_key=bool(self._integrity.key))
        for path in (os.path.dirname(directory), directory):
            try:
                why = why_not_ours(os.lstat(path), self._root, shut)
            except OSError as error:
                why = f"cannot be looked at ({error.strerror})"
            if why:
                _log.warning("owner", "disk tier: not recovered: %s %s: set its mode to 0700", path, why)
                return False
        return True

    # In the threads that read.

    def _scan_directory(self, directory: str, parts: "queue.SimpleQueue[_Part | BaseException]") -> None:
        """Puts one part, or what went wrong: either is waited for."""
        part = _Part()
        try:
            for object_id, files in self._sort_files(directory, part).items():
                if self._is_closing:
                    break
                self._read(object_id, files, part)
        except OSError as error:
            _log.warning("list", "disk tier: not recovered: %s", error)
            part.num_unread += 1
            parts.put(part)
        except SHUTDOWN:
            raise
        except BaseException as error:
            parts.put(error)
        else:
            parts.put(part)

    def _sort_files(self, directory: str, part: _Part) -> dict[ObjectId, list[FoundFile]]:
        """The files in their places, by object; those that have an object's name in another place are useless."""
        by_object: dict[ObjectId, list[FoundFile]] = {}
        for file in scan_directory(directory, is_strict=True):
            if (parsed := parse_file_name(file.name)) is None:
                continue
            object_id, rank = parsed
            if rank < self._world_size and file.path == self._namespace.path_of(self._root, object_id, rank):
                by_object.setdefault(object_id, []).append(file)
            else:
                part.useless.append(file)
        return by_object

    def _read(self, object_id: ObjectId, files: list[FoundFile], part: _Part) -> None:
        try:
            planned = read_planned(
                self._device, self._root, self._namespace, self._world_size, object_id, self._integrity
            )
        except BadObject as bad:
            _log.warning(bad.reason, "disk tier: not recovered (%s): %s", bad.reason, files[0].path)
            if bad.is_bad:
                part.useless.extend(files)
            else:
                part.num_unread += 1
        else:
            part.objects.append(FoundObject(planned, max(file.mtime for file in files), tuple(files)))
