# SPDX-License-Identifier: Apache-2.0
"""The door: every operation on the catalogue of a root, each in transactions of bounded size."""

import contextlib
import itertools
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Set
from typing import TypeVar

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import eviction, feed, garbage, namespaces, objects, writers
from vllm_overlay.tiers.disk.catalogue.connection import LONG_CALLS, Connection
from vllm_overlay.tiers.disk.catalogue.errors import Busy, Unavailable
from vllm_overlay.tiers.disk.catalogue.eviction import Limits, Scored
from vllm_overlay.tiers.disk.catalogue.feed import Changes, Loader
from vllm_overlay.tiers.disk.catalogue.generations import DEFAULT_TIMEOUT_S
from vllm_overlay.tiers.disk.catalogue.namespaces import Namespace, NamespaceUsage, check_namespace
from vllm_overlay.tiers.disk.catalogue.objects import Committed, Refusal
from vllm_overlay.tiers.disk.catalogue.rows import (
    File,
    Fingerprint,
    Garbage,
    NumBytes,
    ObjectBytes,
    Score,
    Seconds,
    StoredObject,
    WorldSize,
    check_objects,
    check_value,
    file_columns,
    number_of,
)
from vllm_overlay.tiers.disk.catalogue.writers import Grant, Totals, WriterRow

BATCH_ROWS = 256
_FIRST = (-(2**63), -1)
_Item = TypeVar("_Item")


class Catalogue:
    """What a root's processes know together: objects, bytes, recency, writers. Safe to use from several threads.

    Every call may wait ``timeout_s`` for each of its transactions, so none is made from the scheduler's thread. Every
    call raises CatalogueError (``Damaged``, ``Superseded``, ``Busy``, ``Unavailable``), and ValueError for arguments
    that could not be kept or a call at the wrong time. A call for a writer that has no row any more raises
    ``Superseded``: it joins anew. Times are in seconds since the epoch.
    A long batch is several transactions: after an error its first part may be done.
    """

    def __init__(self, root: str, journal: str = "wal", timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Open the catalogue of a root, or begin one that must be rebuilt.

        ``journal`` is "wal" on a local file system, else "delete". Raises ConfigError too, where the root is not a
        directory of this user; one that is not there is ``Unavailable``.
        """
        self._connection = Connection(root, journal, timeout_s)

    @property
    def generation(self) -> int:
        """Which of the root's catalogues this is."""
        return self._connection.generation

    def close(self) -> None:
        """Close the file. The rows of writers stay."""
        self._connection.close()

    # Writers.

    def join(self, writer: str, namespace: Namespace) -> None:
        """This writer serves the namespace from now on; what it was granted stays its own. Join before you ``load``."""
        number = number_of(writer)
        check_namespace(namespace)
        with self._connection.writing() as db:
            writers.join(db, number, namespace)

    def serve(self, writer: str, namespace: Namespace) -> None:
        """As ``join``, of a writer that has joined."""
        number = number_of(writer)
        check_namespace(namespace)
        with self._connection.writing() as db:
            writers.read_grant(db, number)
            writers.join(db, number, namespace)

    def leave(self, writer: str, in_flight_bytes: int = 0) -> None:
        """It serves nothing any more. ``in_flight_bytes`` are of files that may still appear: others must bury it."""
        number = number_of(writer)
        check_value(NumBytes, in_flight_bytes)
        with self._connection.writing() as db:
            writers.leave(db, number, in_flight_bytes)

    def writers(self) -> list[WriterRow]:
        """Who serves a namespace or was granted bytes. What has ended and left nothing but files has no row."""
        with self._connection.reading() as db:
            return writers.read_writers(db)

    def numbers_of(self, writer: str) -> set[int] | None:
        """The numbers of its files that a row or the garbage names; None until a rebuild is complete."""
        number = number_of(writer)
        with self._connection.reading(LONG_CALLS) as db:
            return garbage.numbers_of(db, number) if writers.is_complete(db) else None

    def bury(self, writer: str, heir: str) -> int:
        """End a writer that is dead and whose directory has no file that nothing names; returns what it was granted.

        What it had to unlink is the heir's. Until a rebuild is complete nothing is done.
        """
        numbers = number_of(writer), number_of(heir)
        if writer == heir:
            raise ValueError(f"writer {writer} cannot bury itself")
        with self._connection.writing() as db:
            return writers.bury(db, *numbers) if writers.is_complete(db) else 0

    # Room.

    def grant(self, writer: str, num_bytes: int, at_least: int, capacity_bytes: int) -> Grant:
        """Ask for room before files are written. ``at_least`` is what the next object takes in all ranks.

        Nothing is granted until a rebuild is complete.
        """
        number = number_of(writer)
        for value in (num_bytes, at_least, capacity_bytes):
            check_value(NumBytes, value)
        with self._connection.writing() as db:
            return writers.grant(db, number, num_bytes, at_least, capacity_bytes)

    def give_back(self, writer: str, num_bytes: int) -> int:
        """Return room for which nothing will be written; returns what this writer still holds."""
        number = number_of(writer)
        check_value(NumBytes, num_bytes)
        with self._connection.writing() as db:
            return writers.give_back(db, number, num_bytes)

    def totals(self) -> Totals:
        """The counters: as fast with a million objects as with none."""
        with self._connection.reading() as db:
            return writers.read_totals(db)

    # Objects.

    def commit(self, writer: str, batch: Iterable[tuple[StoredObject, File | None]]) -> list[Committed | Refusal]:
        """Take in objects, parents first, whose files are in place; their bytes come from this writer's grant.

        The second of a pair is the file that this one replaces: it becomes this writer's garbage. First commit wins: if
        a row of another file is there, the answer names that. An answer each, in order.
        """
        number = number_of(writer)
        answers: list[Committed | Refusal] = []
        for part in _batches(batch):
            check_objects([item for item, _ in part])
            if others := {item.file.writer for item, _ in part} - {writer}:
                raise ValueError(f"writer {writer} cannot commit a file of {others.pop()}")
            with self._connection.writing() as db:
                answers += objects.commit(db, number, part)
                feed.trim(db)
        return answers

    def named(self, files: Iterable[File]) -> set[File]:
        """Those of these files that a row or the garbage names."""
        found: set[File] = set()
        for part in _batches(files):
            with self._connection.reading() as db:
                found |= garbage.named(db, part)
        return found

    def load(self, fingerprint: str) -> tuple[int, Iterator[list[StoredObject]]]:
        """All objects of a namespace, parents first, in slices; and the number to give to ``changes_since`` after the
        last slice."""
        check_value(Fingerprint, fingerprint)
        with self._connection.reading() as db:
            seq = feed.last_seq(db)
        return seq, self._slices(Loader(fingerprint))

    def load_all(self) -> Iterator[list[StoredObject]]:
        """The objects of every namespace, for tools."""
        return self._slices(Loader(None))

    def changes_since(self, seq: int, fingerprint: str) -> Changes:
        """What changed after ``seq``, at most a thousand, the caller's own changes in their places among others'.

        Raises FellBehind: then ``load`` again.
        """
        with self._connection.reading() as db:
            return feed.read(db, seq, fingerprint)

    def touch(self, fingerprint: str, object_ids: Iterable[ObjectId], now: int) -> None:
        """These objects were used: no score that was published before holds them back."""
        check_value(Seconds, now)
        for part in _batches(object_ids):
            with self._connection.writing() as db:
                eviction.touch(db, fingerprint, part, now)

    def publish_scores(self, fingerprint: str, scored: Iterable[Scored], expires_at: int) -> None:
        """Until ``expires_at`` evict these objects as if they had last been used at the time that the score says.

        An object that was used after its ``until`` is passed over. What loses its last child and has no score takes
        over the child's: so what hangs on nothing else goes with it.
        """
        check_value(Seconds, expires_at)
        for part in _batches(scored):
            check_value(list[Score], [value for item in part for value in (item.score, item.until)])
            with self._connection.writing() as db:
                eviction.publish(db, fingerprint, part, expires_at)

    def learned(self, fingerprint: str) -> bytes | None:
        """What eviction has learned of a namespace."""
        with self._connection.reading() as db:
            return namespaces.learned(db, fingerprint)

    def keep_learned(self, fingerprint: str, learned: bytes) -> None:
        """Keep it for the next start, at most 16 KiB."""
        with self._connection.writing() as db:
            namespaces.keep_learned(db, fingerprint, learned)

    # Removal. The caller unlinks what is returned and calls ``collected`` then.

    def choose_victims(self, limits: Limits, now: int) -> list[Garbage]:
        """What ``evict`` would take out, also while nothing can be written. Changes nothing that anybody can see."""
        with contextlib.suppress(Busy, Unavailable):
            self._expire_scores(now)
        with self._connection.reading() as db:
            return eviction.choose(db, limits)

    def evict(
        self, writer: str, limits: Limits, now: int, may_go: Callable[[list[File]], Set[File]] | None = None
    ) -> list[Garbage]:
        """Take out at most 256 objects, those that are worth the least over all namespaces, leaves first.

        One transaction chooses and takes out, so no two processes choose the same. ``may_go`` is told what was chosen,
        and says what of it may go; it must not wait.
        """
        number = number_of(writer)
        if limits.num_objects > BATCH_ROWS:
            raise ValueError(f"at most {BATCH_ROWS} objects go at once, not {limits.num_objects}")
        self._expire_scores(now)
        with self._connection.writing() as db:
            return eviction.evict(db, number, limits, may_go)

    def garbage(self, writer: str, most: int = BATCH_ROWS, after: File | None = None) -> list[Garbage]:
        """What this writer has to unlink, and what nobody has claimed: it is this writer's then.

        At most ``most``, in an order in which ``after`` goes on.
        """
        number = number_of(writer)
        start = _FIRST if after is None else file_columns(after)
        with self._connection.writing() as db:
            writers.read_grant(db, number)
            return garbage.claim(db, number, min(most, BATCH_ROWS), start)

    def collected(self, writer: str, files: Iterable[File], keep_bytes: int = 0, capacity_bytes: int = 0) -> int:
        """These files are gone. Up to ``keep_bytes`` of what that frees become this writer's room, as far as the
        capacity is kept; returns them."""
        number = number_of(writer)
        for value in (keep_bytes, capacity_bytes):
            check_value(NumBytes, value)
        kept = 0
        for part in _batches(files):
            with self._connection.writing() as db:
                freed = garbage.collected(db, part)
                kept += writers.keep(db, number, min(freed, keep_bytes - kept), capacity_bytes)
        return kept

    # Rebuild, by one process at a time.

    def adopt(self, batch: Iterable[StoredObject], served: Iterable[Namespace] = ()) -> None:
        """Take in objects whose files a rebuild has found; they need no grant. Parents first.

        A file whose object has another file by now, or lacks a parent, is garbage.
        """
        checked = list(served)
        for namespace in checked:
            check_namespace(namespace)
        with self._rebuilding() as db:
            for namespace in checked:
                namespaces.add_namespace(db, namespace)
        for part in _batches(batch):
            check_objects(part)
            with self._rebuilding() as db:
                objects.adopt(db, part)
                feed.trim(db)

    def discard(self, files: Iterable[Garbage]) -> None:
        """Files that a rebuild has found and that no row names are garbage."""
        for part in _batches(files):
            for item in part:
                check_value(WorldSize, item.world_size)
                check_value(ObjectBytes, item.num_bytes)
            with self._rebuilding() as db:
                garbage.discard(db, part)

    def end_rebuild(self) -> None:
        """All files are known: room is granted from now on."""
        with self._connection.writing() as db:
            db.execute("UPDATE meta SET is_complete = 1")

    # Tools.

    def usage(self) -> list[NamespaceUsage]:
        """One a namespace, the largest first. Reads every row."""
        with self._connection.reading(LONG_CALLS) as db:
            return namespaces.measure(db)

    # How it is done.

    @contextlib.contextmanager
    def _rebuilding(self) -> Iterator[sqlite3.Connection]:
        with self._connection.writing() as db:
            if writers.is_complete(db):
                raise ValueError("the rebuild has ended")
            yield db

    def _slices(self, loader: Loader) -> Iterator[list[StoredObject]]:
        while not loader.is_done:
            with self._connection.reading() as db:
                found = loader.read(db)
            if found:
                yield found

    def _expire_scores(self, now: int) -> None:
        check_value(Seconds, now)
        with self._connection.reading() as db:
            has_more = eviction.has_expired(db, now)
        while has_more:
            with self._connection.writing() as db:
                has_more = eviction.expire(db, now, BATCH_ROWS)


def _batches(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    iterator = iter(items)
    while part := list(itertools.islice(iterator, BATCH_ROWS)):
        yield part
