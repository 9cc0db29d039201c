# SPDX-License-Identifier: Apache-2.0
"""Tells a new catalogue of every whole object under its root, of whatever model, by the headers of its files."""

import errno
import logging
import math
import os
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import msgspec

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import BATCH_ROWS, File, Garbage, Namespace, StoredObject
from vllm_overlay.tiers.disk.files.format import FormatError, ObjectHeader, file_bytes
from vllm_overlay.tiers.disk.files.object_file import BadObject, read_header
from vllm_overlay.tiers.disk.files.writer import directories_under, parse_name, writers_under
from vllm_overlay.tiers.disk.site import Seat
from vllm_overlay.tiers.disk.thread_pool import ThreadPool

GIVE_UP_S = 60.0
"""So long a rebuild waits for files that cannot be read, and nothing is stored. After that they are lost, unless these
are more than those that can be read: then it is the disk that has to come back."""
_PROGRESS_S = 10.0
_READ_THREADS = 4
logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)


@dataclass(frozen=True, slots=True)
class Found:
    """A whole object: the header of its first rank, and the time at which its last file was written."""

    item: StoredObject
    is_private: bool
    written_at: float


class Rebuild:
    """One rebuild. ``fingerprint`` is this engine's namespace: there only what its key proves counts. Of other
    namespaces, whose keys this process may not have, headers are believed: their objects are counted and removed in
    order here, and never loaded.

    ``is_closing`` is asked often. Once it says yes, what was found means nothing.
    """

    def __init__(self, seat: Seat, fingerprint: str, is_closing: Callable[[], bool]) -> None:
        self._catalogue = seat.catalogue
        self._root = seat.root
        self._fingerprint = fingerprint
        self._device = seat.site.device
        self._integrity = seat.site.integrity
        self._is_closing = is_closing
        self._give_up_at = math.inf
        self._unread: list[str] = []
        """Files of which nothing is known."""

    def run(self) -> bool:
        """The newest whole file of an object counts, and all other whole ones are garbage. Returns whether all was
        read. Raises CatalogueError, OSError: then call it again soon."""
        started = time.monotonic()
        self._give_up_at = min(self._give_up_at, started + GIVE_UP_S)
        self._unread.clear()
        newest: dict[tuple[str, ObjectId], Found] = {}
        useless: list[Found] = []
        for found in self._read_all():
            name = found.item.fingerprint, found.item.object_id
            before = newest.get(name)
            if before is not None and (before.written_at, before.item.file) > (found.written_at, found.item.file):
                before, found = found, before
            newest[name] = found
            if before is not None:
                useless.append(before)
        if self._is_closing():
            return False
        if self._unread and (time.monotonic() < self._give_up_at or len(self._unread) > len(newest)):
            raise OSError(errno.EIO, f"{len(self._unread)} files cannot be read now", self._unread[0])
        good, lost = parents_first(newest.values())
        private = {found.item.fingerprint for found in good if found.is_private}
        namespaces = {found.item.fingerprint for found in good}
        self._catalogue.adopt((), [Namespace(each, is_private=each in private) for each in sorted(namespaces)])
        for start in range(0, len(good), BATCH_ROWS):
            self._catalogue.adopt([found.item for found in good[start : start + BATCH_ROWS]])
        useless += lost
        self._catalogue.discard(_garbage(found.item) for found in useless)
        logger.info(
            "disk tier: recovered %d objects under %s in %.1f s; %d others can be reached by nobody",
            len(good), self._root, time.monotonic() - started, len(useless),
        )  # fmt: skip
        return True

    def _read_all(self) -> Iterator[Found]:
        """Several directories at a time."""
        directories = [
            (writer, directory)
            for writer in writers_under(self._root)
            for directory in directories_under(self._root, writer)
        ]
        results: queue.SimpleQueue[list[Found] | BaseException] = queue.SimpleQueue()
        pool = ThreadPool("disk-recovery-read", _READ_THREADS)
        for writer, directory in directories:
            pool.submit(partial(self._read_directory, writer, directory, results))
        count, logged = 0, time.monotonic()
        try:
            for number in range(1, 1 + len(directories)):
                found = results.get()
                if isinstance(found, BaseException):
                    raise found
                yield from found
                count += len(found)
                if time.monotonic() - logged > _PROGRESS_S and not self._is_closing():
                    logged = time.monotonic()
                    logger.info(
                        "disk tier: recovered %d objects so far, in %d of %d directories",
                        count, number, len(directories),
                    )  # fmt: skip
        finally:
            pool.stop(0.0)

    # In the threads that read.

    def _read_directory(
        self, writer: str, directory: str, results: "queue.SimpleQueue[list[Found] | BaseException]"
    ) -> None:
        """Puts what is whole in a directory, or what went wrong, because either is waited for."""
        try:
            ranks: defaultdict[int, set[int]] = defaultdict(set)
            for name in os.listdir(directory):
                if (parsed := parse_name(name)) is not None:
                    ranks[parsed[0]].add(parsed[1])
            found = [] if self._is_closing() else list(self._read_objects(writer, directory, ranks))
        except SHUTDOWN:
            raise
        except BaseException as error:
            results.put(error)
        else:
            results.put(found)

    def _read_objects(self, writer: str, directory: str, ranks: dict[int, set[int]]) -> Iterator[Found]:
        for number, of_one in ranks.items():
            if self._is_closing():
                return
            file = File(writer, number)
            try:
                yield self._read_object(file, directory, of_one)
            except BadObject as bad:
                if not (bad.is_bad or bad.is_unreadable):  # this process lacks memory or descriptors: read all again
                    raise OSError(f"{directory}/{number} cannot be read now") from bad
                if bad.is_unreadable:
                    self._unread.append(f"{directory}/{number}")
                _log.warning(bad.reason, "disk tier: not recovered (%s): %s/%s", bad.reason, directory, number)

    def _read_object(self, file: File, directory: str, ranks: set[int]) -> Found:
        """Raises BadObject unless every rank has a sound file and all say the same."""
        read = [
            read_header(self._device, os.path.join(directory, f"{file.number}.r{rank}"), self._decode)
            for rank in sorted(ranks)
        ]
        first = read[0][0]
        if ranks != set(range(first.world_size)):
            raise BadObject(Reason.MISSING)
        for rank, (header, _) in enumerate(read):
            if header != msgspec.structs.replace(first, rank=rank, seal=header.seal) or header.file != file:
                raise BadObject(Reason.HEADER)
        written_at = max(moment for _, moment in read)
        last_use = max(0, min(int(time.time()), int(written_at)))
        num_bytes = len(ranks) * file_bytes(first.payload_bytes)
        item = StoredObject(first.fingerprint.hex(), first.planned, file, len(ranks), num_bytes, last_use)
        return Found(item, first.is_private, written_at)

    def _decode(self, page: bytes) -> ObjectHeader:
        """Raises FormatError."""
        try:
            return ObjectHeader.decode(page, self._integrity)
        except FormatError:
            header = ObjectHeader.decode_unverified(page)
            if header.fingerprint.hex() == self._fingerprint:
                raise
            return header


def _garbage(item: StoredObject) -> Garbage:
    return Garbage(item.file, item.world_size, item.num_bytes)


def parents_first(found: Iterable[Found]) -> tuple[list[Found], list[Found]]:
    """The objects that can be reached, and those that cannot. Each comes after its parents, otherwise the oldest
    first."""
    by_name = {(each.item.fingerprint, each.item.object_id): each for each in found}
    is_reachable: dict[tuple[str, ObjectId], bool] = {}
    opened: set[tuple[str, ObjectId]] = set()
    order: list[Found] = []
    for first in sorted(by_name.values(), key=lambda each: each.written_at):
        path = [first]
        while path:
            each = path[-1]
            name = each.item.fingerprint, each.item.object_id
            parents = [(each.item.fingerprint, parent) for parent in each.item.planned.parents]
            if name not in opened:
                opened.add(name)
                path += [by_name[parent] for parent in parents if parent in by_name and parent not in opened]
                continue
            path.pop()
            if name not in is_reachable:
                is_reachable[name] = all(is_reachable.get(parent, False) for parent in parents)
                order.append(each)
    good = [each for each in order if is_reachable[each.item.fingerprint, each.item.object_id]]
    lost = [each for each in order if not is_reachable[each.item.fingerprint, each.item.object_id]]
    return good, lost
