# SPDX-License-Identifier: Apache-2.0
"""What the disk tier's halves keep to themselves. Only here do tests read or set it."""

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator

from tests.waiting import until
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.catalogue import Catalogue, CatalogueError, File
from vllm_overlay.tiers.disk.catalogue.connection import Connection
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.messages import Update
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.policies.reuse import Learned

# The index half.


def room_bytes(tier: DiskTierManager) -> int:
    """Bytes that no store has taken."""
    return tier._bookkeeper._room.available


def expect_stores(tier: DiskTierManager) -> None:
    """As a lookup does: a request has come."""
    tier._bookkeeper.expect_stores()


def stores_in_flight_bytes(tier: DiskTierManager) -> int:
    """Bytes that stores have taken and the catalogue does not count as objects' yet."""
    return tier._bookkeeper._room.in_flight


def file_of(tier: DiskTierManager, object_id: ObjectId) -> File | None:
    """The file in which the index has an object."""
    entry = tier.index.get(object_id)
    return None if entry is None else tier._tickets.file(entry.ticket)


def held_files(tier: DiskTierManager) -> frozenset[File]:
    """What loads and stores need, so that it is not evicted."""
    return tier._served.holds.held()


def is_serving_last(tier: DiskTierManager) -> bool:
    """Whether the bookkeeper has arrived in the namespace of the last reset, and told the catalogue of it."""
    session = tier._bookkeeper._session
    return session is not None and session.served is tier._served


def catalogue_of(tier: DiskTierManager) -> Catalogue:
    """The bookkeeper's, for a test to ask or to make fail. Its thread opens it."""
    session = until(lambda: tier._bookkeeper._session, "an open catalogue")
    assert session is not None
    return session.catalogue


def end_transactions_with(commit: Callable[[sqlite3.Connection], None]) -> None:
    """Whatever catalogue this process opens."""
    Connection._commit = lambda connection: commit(connection._db)  # type: ignore[method-assign]


def is_member(tier: DiskTierManager) -> bool:
    """Whether the process is a member of the catalogue of the root that is there now."""
    session = tier._bookkeeper._session
    try:
        return session is not None and session.catalogue.totals().num_writers > 0
    except CatalogueError:
        return False


def has_buried(tier: DiskTierManager) -> bool:
    """Whether this engine has looked once whether anybody is dead, and looked after those who are."""
    session = tier._bookkeeper._session
    return session is not None and session.recovery.has_buried


def tell(tier: DiskTierManager, update: Update) -> None:
    """The scheduler hears of it at its next ``advance``, as if the bookkeeper had said so."""
    tier._served.updates.append(update)


def learned_of(tier: DiskTierManager) -> Learned:
    """What eviction knows, of a tier with a learned policy."""
    assert tier._ranker is not None
    return tier._ranker.learned()


def wanted_namespace(tier: DiskTierManager) -> DiskNamespace:
    """The namespace since the last reset."""
    return tier._served.namespace


@contextlib.contextmanager
def delay_bookkeeper(tier: DiskTierManager) -> Iterator[None]:
    """The bookkeeper does nothing meanwhile, as that of a stopped process."""
    bookkeeper, may_go, waits = tier._bookkeeper, threading.Event(), threading.Event()
    turn = bookkeeper._turn

    def late() -> None:
        waits.set()
        until(may_go.is_set, "the end of the delay")
        turn()

    bookkeeper._turn = late  # type: ignore[method-assign]
    try:
        wake(tier)
        until(waits.is_set, "a turn")
        yield
    finally:
        bookkeeper._turn = turn  # type: ignore[method-assign]
        may_go.set()


@contextlib.contextmanager
def delay_following(tier: DiskTierManager) -> Iterator[None]:
    """The scheduler hears of no change in the catalogue meanwhile, while the bookkeeper does all the rest."""
    assert tier._bookkeeper._session is not None
    follower = tier._bookkeeper._session.follower
    follow = follower.follow
    follower.follow = lambda is_complete: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        follower.follow = follow  # type: ignore[method-assign]


def num_turns(tier: DiskTierManager) -> int:
    """How often the bookkeeper has done all that there was to do."""
    return tier._bookkeeper._num_turns


def wake(tier: DiskTierManager) -> None:
    """The bookkeeper has a turn without waiting for its tick."""
    tier._bookkeeper._wake()


def is_running(tier: DiskTierManager) -> bool:
    """Whether the bookkeeper's thread, or that of the recovery which it began last, has not ended."""
    bookkeeper = tier._bookkeeper
    session = bookkeeper._session
    return bookkeeper._thread.is_alive() or (session is not None and session.recovery._thread.is_alive())


def has_news(tier: DiskTierManager) -> bool:
    """Whether the bookkeeper has something to do, or the scheduler something to take in."""
    return bool(tier._bookkeeper._steps or tier._served.updates or tier._bookkeeper._is_woken)


# The byte half.


def free_staging_units(worker: DiskTierWorker) -> int:
    with worker._lock:
        return worker._staging._free.num_free


def num_fetched(worker: DiskTierWorker) -> int:
    """Results that wait for ``poll``."""
    return len(worker._fetched)


def put_device(worker: DiskTierWorker, device: Device) -> None:
    worker._device = device


def is_closing(worker: DiskTierWorker) -> bool:
    """Whether it takes no store any more."""
    return worker._is_closing


def is_writing(worker: DiskTierWorker) -> bool:
    """Whether a write thread runs."""
    return any(thread.is_alive() for thread in worker._writers._threads)
