# SPDX-License-Identifier: Apache-2.0
"""The door: every operation on the catalogue of a root, each in transactions of bounded size."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import TypeVar

from vllm_overlay.tiers.disk.catalogue import (
    changes,
    commit,
    grants,
    lookup,
    members,
    namespaces,
    rebuild,
    recency,
    removals,
    totals,
    usage,
)
from vllm_overlay.tiers.disk.catalogue.changes import Changes
from vllm_overlay.tiers.disk.catalogue.commit import Commit
from vllm_overlay.tiers.disk.catalogue.connection import LONG_CALLS, Connection
from vllm_overlay.tiers.disk.catalogue.errors import Damaged, Superseded, translated
from vllm_overlay.tiers.disk.catalogue.eviction import Choice, Limits
from vllm_overlay.tiers.disk.catalogue.generations import DEFAULT_TIMEOUT_S
from vllm_overlay.tiers.disk.catalogue.grants import Grant
from vllm_overlay.tiers.disk.catalogue.load import Loader
from vllm_overlay.tiers.disk.catalogue.members import DeadMember
from vllm_overlay.tiers.disk.catalogue.namespaces import KnownNamespace
from vllm_overlay.tiers.disk.catalogue.rows import (
    Fingerprint,
    Name,
    Namespace,
    NumBytes,
    RemovedObject,
    Score,
    Scored,
    Seconds,
    StoredObject,
    check_object,
    check_value,
)
from vllm_overlay.tiers.disk.catalogue.totals import Totals
from vllm_overlay.tiers.disk.catalogue.usage import NamespaceUsage

BATCH_ROWS = 256
_MOST_ROUNDS = 100
_Item = TypeVar("_Item")


class Catalogue:
    """What a root's processes know together: objects, bytes, recency, members. Safe to use from several threads.

    Every call may wait ``timeout_s`` for each of its transactions, so none is made from the scheduler's thread. Every
    call raises CatalogueError (``Damaged``, ``Superseded``, ``Busy``, ``Unavailable``), and ValueError for arguments
    that could not be kept or a call at the wrong time. Times are in seconds since the epoch.
    A long batch is several transactions: after an error its first part may be done.
    """

    def __init__(self, root: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Open the catalogue of a root, which must be on a local file system, or begin one that must be rebuilt.

        Raises ConfigError too, where the root is not a directory of this user.
        """
        self._root = root
        self._member: members.Membership | None = None
        self._connection = Connection(root, timeout_s)

    @property
    def generation(self) -> int:
        """Which of the root's catalogues this is."""
        return self._connection.generation

    def close(self) -> None:
        """Close the file. A membership that was not left looks like a dead process's from now on."""
        if (member := self.close_file()) is not None:
            member.release()

    def close_file(self) -> members.Membership | None:
        """Close the file. ``count_living`` counts this process until the membership that this returns is released."""
        self._connection.close()
        member, self._member = self._member, None
        return member

    # Membership.

    @property
    def slot(self) -> int:
        """This member's slot; raises ValueError before ``join``."""
        if self._member is None:
            raise ValueError("call join first")
        return self._member.slot

    def join(self, served: Iterable[Namespace], now: int) -> int:
        """Become a member that serves these namespaces; returns the slot. Join before you ``load``."""
        served = _checked_namespaces(served, now)
        if self._member is not None:
            raise ValueError("this catalogue has joined already")
        with self._connection.writing() as db:
            member = members.join(db, self._root)
            try:
                members.serve(db, member.slot, served, now)
            except BaseException:
                member.release()
                raise
        self._member = member
        return member.slot

    def check_membership(self) -> None:
        """Raises Superseded when somebody has removed what others know this member by. Call it now and then."""
        with translated(self.generation):
            if self._member is not None and not self._member.is_in_place(self._root):
                raise Superseded(f"the lock of member {self._member.slot} was removed")

    def serve(self, served: Iterable[Namespace], now: int) -> None:
        """Serve these namespaces, and no more those of before."""
        served = _checked_namespaces(served, now)
        with self._connection.writing() as db:
            members.serve(db, self.slot, served, now)

    def leave(self, in_flight_bytes: int = 0) -> None:
        """End the membership. ``in_flight_bytes`` are of files that may still appear: others must bury this member."""
        check_value(NumBytes, in_flight_bytes)
        with self._connection.writing() as db:
            members.leave(db, self.slot, in_flight_bytes)
        if self._member is not None:
            self._member.release()
            self._member = None

    def count_living(self) -> int:
        """How many processes have joined, whatever catalogue of this root."""
        with translated(self.generation):
            return members.count_living(self._root)

    def dead_members(self) -> list[DeadMember]:
        """What processes left that ended without ``leave``. Remove or adopt their files, then ``bury`` each."""
        with self._connection.reading() as db:
            return members.find_dead(db, self._root)

    def inherit(self, slot: int) -> list[RemovedObject]:
        """Take over what a dead member wanted to unlink: it is this member's removal now. None of a living one's."""
        with self._connection.writing() as db:
            return members.inherit(db, self._root, slot, self.slot)

    def bury(self, slot: int) -> int:
        """Forget a dead member, whose files have been looked after; returns the bytes that this frees."""
        with self._connection.writing() as db:
            return members.bury(db, self._root, slot)

    def namespaces(self) -> list[KnownNamespace]:
        """All of them; takes no time that grows with the number of objects."""
        with self._connection.reading() as db:
            return namespaces.known(db, members.served(db, self._root))

    def drop_empty_namespaces(self) -> list[str]:
        """Forget namespaces without objects that no member serves, not even a dead one; returns their fingerprints."""
        with self._connection.writing() as db:
            return namespaces.drop_empty(db, set[int]().union(*members.served_by(db).values()))

    # Room.

    def grant(self, num_bytes: int, at_least: int, capacity_bytes: int) -> Grant:
        """Ask for room before files are written. ``at_least`` is what the next object takes in all ranks.

        Nothing is granted until a rebuild is complete.
        """
        for value in (num_bytes, at_least, capacity_bytes):
            check_value(NumBytes, value)
        with self._connection.writing() as db:
            return grants.grant(db, self.slot, num_bytes, at_least, capacity_bytes)

    def give_back(self, num_bytes: int) -> int:
        """Return room for which nothing will be written; returns what this member still holds."""
        check_value(NumBytes, num_bytes)
        with self._connection.writing() as db:
            return grants.give_back(db, self.slot, num_bytes)

    def totals(self) -> Totals:
        """The counters: as fast with a million objects as with none."""
        with self._connection.reading() as db:
            return totals.read_totals(db)

    # Objects.

    def commit(self, batch: Iterable[StoredObject], is_there: Callable[[StoredObject], bool] | None = None) -> Commit:
        """Take in objects, parents first, whose files are in place; their bytes come from this member's grant.

        A name that is there is replaced, as its file was. The name was free between another's ``end_removal`` and this
        call, so the files may be gone. ``is_there`` is asked while nobody else can begin a removal; without it, look
        afterwards.
        """
        result = Commit()
        for part in _batches(_checked_objects(batch)):
            with self._connection.writing() as db:
                commit.from_grant(db, self.slot, part, result, is_there)
        return result

    def adopt(self, batch: Iterable[StoredObject]) -> Commit:
        """Take in objects whose files a rebuild has found; they need no grant. Parents first."""
        result = Commit()
        for part in _batches(_checked_objects(batch)):
            with self._connection.writing() as db:
                rebuild.check_rebuilder(db, self.slot)
                commit.without_grant(db, part, result)
        return result

    def find(self, names: Iterable[Name]) -> list[StoredObject]:
        """Those of the named objects that are there."""
        found = []
        for part in _batches(names):
            with self._connection.reading() as db:
                found += lookup.find(db, part)
        return found

    def load(self, fingerprints: Iterable[str]) -> tuple[int, Iterator[list[StoredObject]]]:
        """All objects of these namespaces and their partners, parents first, in slices; and the number to give to
        ``changes_since`` after the last slice."""
        loader = Loader(_checked_fingerprints(fingerprints))
        with self._connection.reading() as db:
            seq = changes.last_seq(db)
        return seq, self._slices(loader)

    def changes_since(self, seq: int, fingerprints: Iterable[str]) -> Changes:
        """What changed after ``seq``, at most a thousand, this member's own changes in their places among others'.

        Raises FellBehind: then ``load`` again.
        """
        wanted = _checked_fingerprints(fingerprints)
        with self._connection.reading() as db:
            return changes.read(db, seq, wanted)

    def touch(self, names: Iterable[Name], now: int) -> None:
        """These objects were used: no score that was published before holds them back."""
        check_value(Seconds, now)
        for part in _batches(names):
            with self._connection.writing() as db:
                recency.touch(db, part, now)

    def publish_scores(self, scores: Iterable[Scored], expires_at: int) -> None:
        """Until ``expires_at`` evict these objects as if they had last been used at the time that the score says.

        An object that was used after its ``until`` is passed over. What loses its last child and has no score takes
        over the child's: so what hangs on nothing else goes with it.
        """
        check_value(Seconds, expires_at)
        for part in _batches(scores):
            for item in part:
                check_value(Score, item.score)
                check_value(Score, item.until)
            with self._connection.writing() as db:
                recency.publish_scores(db, part, expires_at)

    # Removal. The caller unlinks what is returned and calls ``end_removal`` then.

    def choose_victims(self, limits: Limits, now: int) -> list[RemovedObject]:
        """What ``evict`` would remove. Changes nothing that anybody can see."""
        self._expire_scores(now)
        with self._connection.reading() as db:
            return Choice(db, members.served(db, self._root), limits).run().objects

    def evict(
        self, limits: Limits, now: int, may_go: Callable[[list[Name]], Set[Name]] | None = None
    ) -> list[RemovedObject]:
        """Begin to remove at most 256 objects, those that are worth the least over all namespaces, leaves first.

        One transaction chooses and removes, so no two processes choose the same. ``may_go`` is told what was chosen,
        and says what of it may go; it must not wait.
        """
        if limits.num_objects > BATCH_ROWS:
            raise ValueError(f"at most {BATCH_ROWS} objects go at once, not {limits.num_objects}")
        self._expire_scores(now)
        with self._connection.writing() as db:
            victims = Choice(db, members.served(db, self._root), limits).run()
            return removals.begin(db, self.slot, victims.that(may_go))

    def remove(self, names: Iterable[Name]) -> Iterator[list[RemovedObject]]:
        """Begin to remove these objects and everything on top of them, children first, at most 256 a list.

        Each list is removed when it is asked for.
        """
        wanted = list(names)
        for _ in range(_MOST_ROUNDS):  # others may put something on top meanwhile
            with self._connection.reading(LONG_CALLS) as db:
                numbers = removals.subtree(db, wanted)
            if not numbers:
                return
            for part in _batches(numbers):
                with self._connection.writing() as db:
                    removed = removals.begin(db, self.slot, part)
                if removed:
                    yield removed
        raise Damaged(f"{len(numbers)} objects cannot be removed", self.generation)

    def end_removal(self, names: Iterable[Name], keep_bytes: int, capacity_bytes: int) -> int:
        """The files of these are gone. Up to ``keep_bytes`` of what that frees become this member's room, as far as
        the capacity is kept; returns them."""
        for value in (keep_bytes, capacity_bytes):
            check_value(NumBytes, value)
        kept = 0
        for part in _batches(names):
            with self._connection.writing() as db:
                freed = removals.end(db, self.slot, part)
                kept += grants.keep(db, self.slot, min(freed, keep_bytes - kept), capacity_bytes)
        return kept

    # Rebuild.

    def begin_rebuild(self) -> bool:
        """Whether this member shall ``adopt`` all files and ``end_rebuild``: nobody else does, and it is not done."""
        with self._connection.writing() as db:
            return rebuild.begin(db, self._root, self.slot)

    def tell_of(self, found: Iterable[Namespace], now: int) -> None:
        """There are directories of namespaces that perhaps nobody serves. Objects are adopted after that."""
        found = _checked_namespaces(found, now)
        with self._connection.writing() as db:
            namespaces.add(db, found, now)

    def end_rebuild(self) -> None:
        """All files are known: room is granted from now on."""
        with self._connection.writing() as db:
            rebuild.end(db, self.slot)

    # Tools.

    def usage(self) -> list[NamespaceUsage]:
        """One a namespace, the largest first. Reads every row."""
        with self._connection.reading(LONG_CALLS) as db:
            return usage.measure(db, members.served(db, self._root))

    # How it is done.

    def _slices(self, loader: Loader) -> Iterator[list[StoredObject]]:
        while not loader.is_done:
            with self._connection.reading() as db:
                found = loader.read(db)
            if found:
                yield found

    def _expire_scores(self, now: int) -> None:
        check_value(Seconds, now)
        with self._connection.reading() as db:
            has_more = recency.has_expired_scores(db, now)
        while has_more:
            with self._connection.writing() as db:
                has_more = recency.expire_scores(db, now, BATCH_ROWS)


def _batches(items: Iterable[_Item]) -> Iterator[Sequence[_Item]]:
    iterator = iter(items)
    while part := list(itertools.islice(iterator, BATCH_ROWS)):
        yield part


def _checked_objects(batch: Iterable[StoredObject]) -> Iterator[StoredObject]:
    for item in batch:
        check_object(item)
        yield item


def _checked_fingerprints(fingerprints: Iterable[str]) -> tuple[str, ...]:
    checked = tuple(fingerprints)
    for fingerprint in checked:
        check_value(Fingerprint, fingerprint)
    return checked


def _checked_namespaces(served: Iterable[Namespace], now: int) -> list[Namespace]:
    checked = list(served)
    check_value(Seconds, now)
    _checked_fingerprints(each for item in checked for each in (item.fingerprint, item.partner))
    return checked
