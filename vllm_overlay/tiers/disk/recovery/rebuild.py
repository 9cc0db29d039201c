# SPDX-License-Identifier: Apache-2.0
"""Tells a new catalogue of every whole object under its root, of whatever model, by the headers of its files."""

import contextlib
import errno
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from vllm_overlay.common.rate_limited_log import RateLimitedLog
from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import File, Garbage, Namespace, StoredObject
from vllm_overlay.tiers.disk.files.format import FormatError, ObjectHeader, file_bytes
from vllm_overlay.tiers.disk.files.object_file import OWN_TROUBLE, BadObject, read_header
from vllm_overlay.tiers.disk.files.writer import directories_under, parse_name, writers_under
from vllm_overlay.tiers.disk.site import Seat
from vllm_overlay.tiers.disk.thread_pool import in_threads

GIVE_UP_S = 60.0
"""So long a rebuild waits for files that cannot be read, and nothing is stored. After that they are lost, unless these
are more than those that can be read: then it is the disk that has to come back."""
_PROGRESS_S = 10.0
_READ_THREADS = 4
_Name = tuple[str, ObjectId]
logger = logging.getLogger(__name__)
_log = RateLimitedLog(logger)


@dataclass(frozen=True, slots=True)
class Found:
    """A whole object: the header of its first rank, and the time at which its last file was written."""

    item: StoredObject
    is_private: bool
    written_at: float

    @property
    def name(self) -> _Name:
        return self.item.fingerprint, self.item.object_id

    @property
    def parents(self) -> list[_Name]:
        return [(self.item.fingerprint, parent) for parent in self.item.planned.parents]


class Rebuild:
    """One rebuild. ``fingerprint`` is this engine's namespace: there only what its key proves counts. Of other
    namespaces, whose keys this process may not have, headers are believed: their objects are counted and removed in
    order here, and never loaded.

    ``is_closing`` is asked often. Once it says yes, what was found means nothing.
    """

    def __init__(self, seat: Seat, fingerprint: str, is_closing: Callable[[], bool]) -> None:
        self._catalogue, self._root = seat.catalogue, seat.root
        self._fingerprint = fingerprint
        self._device, self._integrity = seat.site.device, seat.site.integrity
        self._is_closing = is_closing
        self._give_up_at = math.inf
        self._unread: list[str] = []
        """Files and directories of which nothing is known."""

    def run(self) -> bool:
        """The newest whole file of an object counts, and all other whole ones are garbage. Returns whether all was
        read. Raises CatalogueError, OSError: then call it again soon."""
        started = time.monotonic()
        self._unread.clear()
        newest: dict[_Name, Found] = {}
        useless: list[Found] = []
        for found in self._read_all():
            rivals = [found, *filter(None, [newest.get(found.name)])]
            rivals.sort(key=lambda each: (each.written_at, each.item.file))
            newest[found.name] = rivals.pop()
            useless += rivals
        if self._is_closing():
            return False
        if self._unread:
            self._give_up_at = min(self._give_up_at, time.monotonic() + GIVE_UP_S)  # after another look in any case
        if self._unread and (time.monotonic() < self._give_up_at or len(self._unread) > len(newest)):
            raise OSError(errno.EIO, f"{len(self._unread)} files or directories cannot be read now", self._unread[0])
        good, lost = parents_first(newest.values())
        private = sorted({found.item.fingerprint for found in good if found.is_private})
        self._catalogue.adopt((found.item for found in good), [Namespace(each, is_private=True) for each in private])
        useless += lost
        self._catalogue.discard(Garbage(each.item.file, each.item.world_size, each.item.num_bytes) for each in useless)
        logger.info(
            "disk tier: recovered %d objects under %s in %.1f s; %d others can be reached by nobody",
            len(good), self._root, time.monotonic() - started, len(useless),
        )  # fmt: skip
        return True

    def _read_all(self) -> Iterator[Found]:
        """Several directories at a time."""
        places: list[tuple[str, str]] = []
        for writer in writers_under(self._root):
            with self._listing(os.path.join(self._root, writer)):
                places += [(writer, directory) for directory in directories_under(self._root, writer)]
        count, logged = 0, time.monotonic()
        for number, found in enumerate(in_threads(self._read_directory, places, _READ_THREADS), 1):
            yield from found
            count += len(found)
            if time.monotonic() - logged > _PROGRESS_S and not self._is_closing():
                logged = time.monotonic()
                logger.info(
                    "disk tier: recovered %d objects so far, in %d of %d directories", count, number, len(places)
                )

    # In the threads that read.

    @contextlib.contextmanager
    def _listing(self, directory: str) -> Iterator[None]:
        """Raises OSError where it is this process that lacks something."""
        try:
            yield
        except FileNotFoundError:  # it went with its last file
            pass
        except OSError as error:
            if error.errno in OWN_TROUBLE:
                raise
            self._unread.append(directory)
            _log.warning("directory", "disk tier: not recovered: %s", error)

    def _read_directory(self, place: tuple[str, str]) -> list[Found]:
        """What is whole there."""
        writer, directory = place
        ranks: defaultdict[int, set[int]] = defaultdict(set)
        found: list[Found] = []
        with self._listing(directory):
            for name in os.listdir(directory):
                if (parsed := parse_name(name)) is not None:
                    ranks[parsed[0]].add(parsed[1])
        for number, of_one in ranks.items():
            if self._is_closing():
                break
            try:
                found.append(self._read_object(File(writer, number), directory, of_one))
            except BadObject as bad:
                if not (bad.is_bad or bad.is_unreadable):  # this process lacks memory or descriptors: read all again
                    raise OSError(f"{directory}/{number} cannot be read now") from bad
                if bad.is_unreadable:
                    self._unread.append(f"{directory}/{number}")
                _log.warning(bad.reason, "disk tier: not recovered (%s): %s/%s", bad.reason, directory, number)
        return found

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


def parents_first(found: Iterable[Found]) -> tuple[list[Found], list[Found]]:
    """The objects that can be reached, each after its parents, otherwise the oldest first; and those that cannot."""
    by_name = {each.name: each for each in found}
    is_reachable: dict[_Name, bool] = {}
    good = []
    for first in sorted(by_name.values(), key=lambda each: each.written_at):
        path = [first]
        while path:
            name, parents = path[-1].name, path[-1].parents
            if name not in is_reachable:
                is_reachable[name] = False
                path += [by_name[parent] for parent in parents if parent in by_name and parent not in is_reachable]
                continue
            each = path.pop()
            if not is_reachable[name] and all(is_reachable.get(parent, False) for parent in parents):
                is_reachable[name] = True
                good.append(each)
    return good, [each for name, each in by_name.items() if not is_reachable[name]]
