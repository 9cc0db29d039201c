# SPDX-License-Identifier: Apache-2.0
"""The TierManager interface: an index half in the scheduler process, a byte half in every worker process.

The index half decides what is kept; the byte half only does what a ticket says. They meet through tickets that travel
in connector metadata and through completions that travel back.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.memory import HostBuffer


@dataclass(frozen=True, slots=True)
class StoreTicket:
    """Permission to write one object. ``ticket`` is unique in the engine's life and serves as generation tag.

    ``reset`` names the last ``TierManager.clear``, for tiers whose objects outlive it; empty before the first. ``over``
    has a file a rank to write over, or nothing.
    """

    ticket: int
    object_id: ObjectId
    parents: tuple[ObjectId, ...]
    start_tokens: int
    end_tokens: int
    num_bytes: int
    units: tuple[int, ...] = ()
    reset: str = ""
    over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadTicket:
    """Permission to read one object, which stays pinned until released. ``ticket`` is the tag it was stored under."""

    ticket: int
    object_id: ObjectId
    num_bytes: int
    units: tuple[int, ...] = ()
    reset: str = ""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds now and what it did since start; bytes are of all ranks together."""

    num_objects: int
    used_bytes: int
    capacity_bytes: int
    evicted_objects: int
    dropped_objects: int


class TierManager(ABC):
    """Scheduler half. All calls come from the scheduler's thread; none may block on a disk."""

    index: PrefixIndex

    @abstractmethod
    def advance(self) -> None:
        """Take in what background work has found or freed. Called before lookups and once a scheduler step."""

    def has_more_to_come(self) -> bool:
        """Whether an idle engine should go on stepping, because ``advance`` will have more to take in soon."""
        return False

    def look_further(  # noqa: B027
        self, planner: HybridOffloadPlanner, keys: Sequence[bytes], num_tokens: int, num_known: int
    ) -> None:
        """A lookup of this prompt found no more than ``num_known`` tokens and wanted more.

        A tier that others share may look, in the background, for what they have stored; a later lookup finds it.
        """

    def should_store(self, object_id: ObjectId) -> bool:
        """Whether to store an object that could be stored now. Called once for each request that could."""
        return True

    @abstractmethod
    def reserve(self, planned: PlannedObject) -> StoreTicket | None:
        """Make room for one object and hand out its ticket.

        None when the object is already there or on its way, a parent is missing, or no room can be made: the store is
        then dropped, which costs a future miss and nothing else.
        """

    @abstractmethod
    def commit(self, ticket: int) -> None:
        """Every rank has stored the object of ``ticket``: it may be found from now on (once its parents may)."""

    @abstractmethod
    def abort(self, ticket: int) -> None:
        """A rank could not store the object of ``ticket``: forget it and what was planned on top of it."""

    @abstractmethod
    def acquire(self, planned: Sequence[PlannedObject]) -> list[LoadTicket] | None:
        """Pin the objects of a load plan, all or none; None when one of them is gone."""

    @abstractmethod
    def release(self, object_ids: Sequence[ObjectId]) -> None:
        """Unpin what ``acquire`` pinned; objects dropped meanwhile are ignored."""

    @abstractmethod
    def drop(self, object_id: ObjectId) -> None:
        """Forget an object that did not verify, with everything that depends on it."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """For metrics."""

    @abstractmethod
    def clear(self) -> None:
        """Never again load what was stored before: the weights may be others now (vLLM's ``reset_connector``)."""

    @abstractmethod
    def close(self) -> None:
        """End background work. Called once, at shutdown."""


@dataclass(frozen=True, slots=True)
class StoreResult:
    """A store ended in this rank. ``reason`` is None when it succeeded."""

    ticket: int
    num_bytes: int
    seconds: float
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class FetchResult:
    """One object of a load is in host memory and verified, or is not.

    ``position`` is its place in the tickets given to ``begin_load``. On success ``buffer`` holds the object until
    ``end_fetch``. On failure ``buffer`` is None, ``reason`` a metric label such as "checksum", and ``is_bad`` says
    whether the object itself must be dropped (a fault of this process, e.g. no staging in time, is not the object's).
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


class TierWorker(ABC):
    """Worker half. All calls come from the worker's main thread; I/O threads stay behind this interface."""

    @abstractmethod
    def begin_store(self, ticket: StoreTicket) -> HostBuffer | None:
        """A buffer to fill before the pass ends, or None when there is no staging room (the store is dropped)."""

    @abstractmethod
    def submit_store(self, ticket: StoreTicket, buffer: HostBuffer) -> None:
        """The buffer is full: keep it. The result comes from a later ``poll``."""

    @abstractmethod
    def cancel_store(self, ticket: StoreTicket, buffer: HostBuffer) -> None:
        """The buffer could not be filled: give it back. No result follows."""

    @abstractmethod
    def begin_load(self, load_id: str, tickets: Sequence[LoadTicket]) -> None:
        """Start fetching and verifying; one ``FetchResult`` a ticket comes from later ``poll`` calls, in any order."""

    @abstractmethod
    def end_fetch(self, load_id: str, position: int) -> None:
        """The fetched object has been copied into the KV cache: take its buffer back."""

    @abstractmethod
    def cancel_load(self, load_id: str) -> None:
        """No further result of this load is wanted. Its buffers are taken back as soon as no thread uses them."""

    def load_was_late(self, load_id: str) -> None:  # noqa: B027
        """The load did not come in the time it had, and is about to be cancelled."""

    def load_pause_s(self) -> float:
        """For how many seconds from now every load would fail at once; 0.0 when loads may come."""
        return 0.0

    @abstractmethod
    def poll(self) -> tuple[list[StoreResult], list[FetchResult]]:
        """What ended since the last call. Never blocks."""

    @abstractmethod
    def pending_stores(self) -> int:
        """Stores submitted and not yet reported."""

    @abstractmethod
    def close(self, timeout_s: float) -> int:
        """Finish pending stores within ``timeout_s``, end all threads; returns how many stores were given up."""
