# SPDX-License-Identifier: Apache-2.0
"""The interface of a tier: a manager in the scheduler's process, a worker in every worker's process, and a spec.

The manager decides what is kept. The worker only does what a ticket says. They meet through tickets, which travel in
connector metadata, and through completions, which travel back. Whatever else a tier needs travels as its own *part* of
a ticket or of the handshake. Everybody else passes a part on without looking at it.
"""

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from vllm_overlay.common.reasons import Reason
from vllm_overlay.config import TierSettings
from vllm_overlay.planner.coverage import HitSource
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.memory import Bytes, HostBuffer

SettingsT = TypeVar("SettingsT", bound=TierSettings)


class StoreTicket(msgspec.Struct, frozen=True, gc=False):
    """Permission to write one object.

    ``ticket`` is unique in the engine's life and serves as generation tag. ``part`` is the tier's own: what its manager
    tells its workers.
    """

    ticket: int
    planned: PlannedObject
    part: Any = None


class LoadTicket(msgspec.Struct, frozen=True, gc=False):
    """Permission to read one object, which stays pinned until released. ``ticket`` is the tag it was stored under."""

    ticket: int
    object_id: ObjectId
    num_bytes: int
    part: Any = None


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds now and what it did since start; bytes are of all ranks together."""

    num_objects: int
    used_bytes: int
    capacity_bytes: int
    evicted_objects: int


class TierManager(ABC):
    """Scheduler half. All calls come from the scheduler's thread; none may block on a disk or a network."""

    @abstractmethod
    def advance(self) -> None:
        """Take in what background work has found or freed. Called before lookups, and once a scheduler step."""

    def has_more_to_come(self) -> bool:
        """Whether an idle engine should go on stepping, because ``advance`` will have more to take in soon."""
        return False

    @abstractmethod
    def hits(self, geometry: Geometry, keys: Sequence[bytes], num_tokens: int) -> HitSource:
        """What answers the questions of one lookup of one prompt. It is not used after that lookup.

        A tier with a ``PrefixIndex`` returns that. A tier whose store answers in batches, or whose objects are not
        prefix-closed, returns ``BatchedHits`` over it.
        """

    @abstractmethod
    def has_or_awaits(self, object_id: ObjectId) -> bool:
        """Whether the object is in the tier or on its way there, so that it need not be stored."""

    def num_held(self, object_ids: Sequence[ObjectId]) -> int:
        """How many of the first of these it has or awaits, before one that it has not."""
        has = self.has_or_awaits
        return sum(1 for _ in itertools.takewhile(has, object_ids))

    def unwanted(self, object_ids: Sequence[ObjectId]) -> Collection[ObjectId]:
        """Which of these not to store, though they could be stored now. Called once for each request that could."""
        return ()

    @abstractmethod
    def reserve(self, planned: PlannedObject) -> StoreTicket | None:
        """Make room for one object and hand out its ticket.

        Returns None when the object is already there or on its way, when a parent is missing, or when no room can be
        made. The store is then dropped, which costs a future miss and nothing else.
        """

    def reserve_all(self, planned: Sequence[PlannedObject]) -> list[StoreTicket | None]:
        """As ``reserve`` for each, in this order. One may be the parent of a later one; none is there twice.

        Called with the chunks that one request completes in a step, and with each snapshot. When it raises, no ticket
        of the call is out. A tier overrides it where to make room for all of them at once costs less. What of
        ``planned`` is there already should not go for the rest.
        """
        tickets: list[StoreTicket | None] = []
        try:
            for item in planned:
                tickets.append(self.reserve(item))
        except BaseException:
            for ticket in filter(None, tickets):
                self.abort(ticket.ticket)
            raise
        return tickets

    @abstractmethod
    def commit(self, ticket: int) -> None:
        """Every rank has stored the object of ``ticket``. It may be found from now on, once its parents may.

        A ticket that has ended is ignored.
        """

    def commit_all(self, tickets: Sequence[int]) -> None:
        """As ``commit`` for each: what every rank has stored by the end of a step.

        When it raises, some may not be committed. They are committed one by one then. A tier overrides it where to take
        all of them in at once costs less.
        """
        for ticket in tickets:
            self.commit(ticket)

    @abstractmethod
    def abort(self, ticket: int) -> None:
        """A rank could not store the object of ``ticket``. Forget it, and what was planned on top of it.

        Called once every rank has reported, so no rank writes to its memory any more.
        """

    @abstractmethod
    def acquire(self, planned: Sequence[PlannedObject]) -> list[LoadTicket] | None:
        """Pin the objects of a load plan, all or none. Returns None when one of them is gone."""

    @abstractmethod
    def release(self, tickets: Sequence[LoadTicket]) -> None:
        """Unpin what ``acquire`` pinned, by the tickets that it gave out. Objects that were dropped meanwhile are
        ignored."""

    def touch(self, object_ids: Sequence[ObjectId]) -> None:  # noqa: B027
        """These objects were used now, though not loaded from here. Those that the tier has are evicted late."""

    @abstractmethod
    def drop(self, object_id: ObjectId) -> None:
        """Stop finding an object, and everything that depends on it. It did not verify, or its store is overdue.

        Memory that a ticket or a load holds is given back only when that has ended.
        """

    def suspend(self, object_id: ObjectId) -> None:  # noqa: B027
        """An object could not be read, and nobody knows whether it is wrong.

        Stop finding it for a while, so that its load is not promised again at once. It may be stored again meanwhile.
        """

    @abstractmethod
    def usage(self) -> TierUsage:
        """For metrics."""

    @abstractmethod
    def clear(self) -> None:
        """Never again load what was stored before: the weights may be others now (vLLM's ``reset_connector``)."""

    @abstractmethod
    def close(self) -> None:
        """End background work. Called once, at shutdown."""


class StoreResult(msgspec.Struct, frozen=True, gc=False):
    """A store ended in this rank. ``reason`` is None when it succeeded."""

    ticket: int
    num_bytes: int
    seconds: float
    reason: Reason | None = None


class FetchResult(msgspec.Struct, frozen=True, gc=False):
    """One object of a load is in host memory and verified, or it is not.

    ``position`` is its place in the tickets given to ``begin_load``. On success ``buffer`` holds the object until
    ``end_fetch``. On failure ``buffer`` is None. ``is_bad`` then says whether the object itself must be dropped. (A
    fault of this process is not the object's, for example no staging in time.) ``is_unreadable`` says that it is to be
    suspended.

    A load whose size exceeds the staging memory arrives in pieces: later objects wait until earlier ones are ended.
    """

    load_id: str
    position: int
    object_id: ObjectId
    num_bytes: int
    seconds: float
    buffer: HostBuffer | None
    reason: Reason | None = None
    is_bad: bool = False
    is_unreadable: bool = False


class TierWorker(ABC):
    """Worker half. All calls come from the worker's main thread; I/O threads stay behind this interface.

    A buffer that it has handed out is the caller's until ``submit_store``, ``cancel_store``, ``end_fetch`` or
    ``cancel_load``: a copy may be using it.
    """

    def host_memory(self) -> Sequence[Bytes]:
        """The pools that its buffers lie in, for a transfer that registers them with its device at start.

        Each is ``HostPool.array``. Empty, the default: the tier's memory is not registered, and copies are slower.
        """
        return ()

    @abstractmethod
    def begin_store(self, ticket: StoreTicket) -> HostBuffer | None:
        """A buffer to fill, or None when there is no staging room (the store is dropped)."""

    def begin_stores(self, tickets: Sequence[StoreTicket]) -> Sequence[HostBuffer | None]:
        """As ``begin_store`` for each, of one step. When it raises, no buffer is handed out."""
        buffers: list[HostBuffer | None] = []
        try:
            for ticket in tickets:
                buffers.append(self.begin_store(ticket))
        except BaseException:
            for ticket, buffer in zip(tickets, buffers, strict=False):
                if buffer is not None:
                    self.cancel_store(ticket, buffer)
            raise
        return buffers

    @abstractmethod
    def submit_store(self, ticket: StoreTicket, buffer: HostBuffer) -> None:
        """The buffer is full: keep it. The result comes from a later ``poll``."""

    def submit_stores(self, left: deque[tuple[StoreTicket, HostBuffer]]) -> None:
        """As ``submit_store`` for each. Takes each out of ``left`` once that has worked."""
        while left:
            self.submit_store(*left[0])
            left.popleft()

    @abstractmethod
    def cancel_store(self, ticket: StoreTicket, buffer: HostBuffer) -> None:
        """The buffer could not be filled: give it back. No result follows."""

    @abstractmethod
    def begin_load(self, load_id: str, tickets: Sequence[LoadTicket]) -> None:
        """Start fetching and verifying. Later ``poll`` calls bring one ``FetchResult`` a ticket, in any order.

        The caller gives the load up at the first failure. So a tier whose objects rot looks at all of them before it
        says which are bad: then the next request finds none of these.
        """

    @abstractmethod
    def end_fetch(self, load_id: str, position: int) -> None:
        """The fetched object has been copied into the KV cache: take its buffer back."""

    @abstractmethod
    def cancel_load(self, load_id: str) -> None:
        """No further result of this load is wanted, and no copy uses its buffers.

        They are taken back as soon as no thread uses them.
        """

    def load_was_late(self, load_id: str) -> None:  # noqa: B027
        """The load did not come in the time it had, and is about to be cancelled."""

    def load_pause_s(self) -> float:
        """For how many seconds from now every load would fail at once. 0.0 when loads may come."""
        return 0.0

    @abstractmethod
    def poll(self) -> tuple[list[StoreResult], list[FetchResult]]:
        """What ended since the last call. Never blocks. Called while a store or a load of this worker is under way."""

    @abstractmethod
    def close(self, timeout_s: float) -> int:
        """Finish pending stores within ``timeout_s`` and end all threads. Returns how many stores were given up."""


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """What stored numbers depend on: a digest of 64 hex digits for chunks, one for snapshots, the facts in words."""

    attention: str
    snapshot: str
    description: dict[str, Any]


class Fingerprinter(Protocol):
    """Computes the fingerprints of this engine's objects, for a tier whose objects outlive the engine."""

    def __call__(self, weights_name: str, cache_directory: Path, facts: Mapping[str, Any]) -> Fingerprints:
        """Called by a tier in every worker, at start. Raises ConfigError.

        ``weights_name`` stands for the weights when it is not empty. Otherwise their files are read once, and their
        digests are kept in ``cache_directory``, which is this user's alone. ``facts`` are the tier's own, by name.
        """


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker knows when it builds its half of a tier."""

    geometry: Geometry
    rank: int
    world_size: int
    step_tokens: int
    """That one step computes at most, of all requests together."""
    fingerprints: Fingerprinter


@dataclass(frozen=True, slots=True)
class TierRoom:
    """What a tier can hold, for a plan: nothing is built for it. All are in bytes of all ranks together."""

    capacity_bytes: int
    object_bytes: Callable[[int], int]
    """The bytes that an object takes there, from its bytes in one rank."""
    held_bytes: int = 0
    """Set aside, of the size that was given: what it says now, or up to an 8th of a larger one."""


class TierSpec(ABC, Generic[SettingsT]):
    """Everything that the connector must know about a kind of tier. ``tiers/factory.py`` finds it by its name."""

    settings_type: ClassVar[type[TierSettings]]
    """The settings that it takes in ``kv_connector_extra_config``."""
    hit_source: ClassVar[str] = "external_unspecified"
    """Where its tokens come from: a value of vLLM's ``CacheHitSource``."""
    auto_object_bytes: ClassVar[int | None] = None
    """``hybrid_chunk_size`` "auto" picks the smallest chunk of at least so many bytes. None: chunks of 64 tokens."""
    prior_load_weight: ClassVar[float] = 0.8
    """``load_weight`` "auto" until it is measured: the share of computing that loads save, below 1."""
    outlives_engine: ClassVar[bool] = False
    """Whether a later process finds its objects. Then their names must not change from process to process."""

    def __init__(self, settings: SettingsT) -> None:
        self.settings = settings

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that the tier may hold for all ranks together, for the log. None when it does not say."""
        return None

    @property
    def learns(self) -> bool:
        """Whether its eviction policy learns, and so gives up speculative snapshots before others."""
        return False

    def exclusive(self) -> dict[str, str]:
        """What no other tier of the same engine may have: setting -> value, in a form in which two can be compared."""
        return {}

    @abstractmethod
    def build_worker(self, context: WorkerContext) -> tuple[TierWorker, Any]:
        """This rank's half and the tier's own part of the handshake. Raises ConfigError.

        Called once in each worker, at start. The part travels to the scheduler and must be equal in all ranks.
        """

    @abstractmethod
    def build_manager(self, geometry: Geometry, world_size: int, step_tokens: int, part: Any) -> TierManager:
        """The scheduler's half, from the ranks' part of the handshake. Raises ConfigError. Called once, at start.

        One step computes at most ``step_tokens``, of all requests together.
        """

    def room(self, geometry: Geometry, world_size: int, step_tokens: int) -> TierRoom | None:
        """What the tier would hold of that geometry. None: it cannot tell.

        Called by `vllm-overlay plan`, which has no engine. Raises the ConfigError that a start would.
        """
        return None

    def host_bytes(self, geometry: Geometry, world_size: int, step_tokens: int) -> int:
        """Host memory that the tier takes, of all ranks together. Called by `vllm-overlay plan` as ``room`` is."""
        return 0
