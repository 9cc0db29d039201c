# SPDX-License-Identifier: Apache-2.0
"""What crosses between the scheduler's MultiConnector and the workers': one part per child, in configured order."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_overlay.multi_connector import validation
from vllm_overlay.multi_connector.child import harmless
from vllm_overlay.named_child import QuietStep

NULL_BLOCK = 0
"""vLLM's block that stands for none: always the first that the pool hands out."""


class Duty(Enum):
    """What a rank has to do with its instance of a child."""

    SERVE = "serve"
    STOP = "stop"
    STAND_BY = "stand by"
    """Build the new instance; give it no work yet."""


@dataclass(slots=True, frozen=True)
class Order:
    """Scheduler to ranks, one a child and step. ``generation``: which instance is meant."""

    generation: int
    duty: Duty


@dataclass(slots=True, frozen=True)
class Load:
    """One load handed to a child."""

    child: int
    blocks: tuple[int, ...] = ()
    """The blocks of all groups that it alone writes."""
    is_synchronous: bool = False


@dataclass(slots=True)
class MultiMetadata(KVConnectorMetadata):  # type: ignore[misc, unused-ignore]
    """Scheduler to workers, once a step. Until then it gathers what has happened since the last."""

    children: tuple[KVConnectorMetadata | None, ...] = ()
    loads: dict[str, Load] = field(default_factory=dict)
    """Request -> the load its chosen child was handed since the last step."""
    saves: dict[str, frozenset[int]] = field(default_factory=dict)
    """Request finished since the last step -> the children that hold its blocks."""
    orders: tuple[Order, ...] = ()
    """What every rank has to do with each child; a child that does not serve has no part in ``children``."""
    unknown_requests: dict[int, frozenset[str]] = field(default_factory=dict)
    """Child that came back since the last step -> requests that lived then, which are unknown to its new instance."""
    preempted: set[str] = field(default_factory=set)
    """For children whose handle_preemptions is the older one that takes request ids."""
    arrived: set[str] = field(default_factory=set)
    """Requests that have come since the last step and are not finished."""
    departed: set[str] = field(default_factory=set)
    """Requests that have finished since the last step."""
    releases: set[str] = field(default_factory=set)
    """Finished requests whose blocks are free: ranks that never report them expect nothing of them any more."""

    @property
    def is_quiet(self) -> bool:
        """Whether a rank that knows the orders has nothing to do."""
        if self.arrived or self.departed or self.loads or self.saves or self.releases or self.unknown_requests:
            return False
        return set(map(type, self.children)) <= {QuietStep}


@dataclass(slots=True)
class MultiWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc, unused-ignore]
    """Workers to scheduler, once a step. vLLM adds the ranks' up with ``aggregate``."""

    children: tuple[KVConnectorWorkerMetadata | None, ...]
    orders: tuple[Order, ...] = ()
    """The orders that this answers; empty when ranks answer different ones."""
    broken: frozenset[int] = frozenset()
    """Children that have failed on some rank and are not ordered to stop."""
    unstopped: frozenset[int] = frozenset()
    """Children ordered to stop that may still touch blocks on some rank."""
    handshakes: dict[int, dict[tuple[int, int], KVConnectorHandshakeMetadata]] = field(default_factory=dict)
    """Child that stands by -> (pipeline rank, tensor rank) -> what its new instance there says."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "MultiWorkerMetadata":
        """If a child's own ``aggregate`` raises, a rank's report is lost, so the child is reported broken."""
        assert isinstance(other, MultiWorkerMetadata)
        broken = set(range(len(self.children)))
        children: list[KVConnectorWorkerMetadata | None] = [None] * len(self.children)
        for index, (mine, theirs) in enumerate(zip(self.children, other.children, strict=True)):
            with harmless(f"Worker metadata of child {index} could not be added up. The child is isolated."):
                merged = theirs if mine is None else mine if theirs is None else mine.aggregate(theirs)
                children[index] = validation.worker_metadata(merged)
                broken.discard(index)
        indexes = self.handshakes.keys() | other.handshakes.keys()
        return MultiWorkerMetadata(
            tuple(children),
            self.orders if self.orders == other.orders else (),
            self.broken | other.broken | broken,
            self.unstopped | other.unstopped,
            {i: {**self.handshakes.get(i, {}), **other.handshakes.get(i, {})} for i in indexes},
        )


@dataclass(slots=True, frozen=True)
class MultiHandshakeMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc, unused-ignore]
    """Each child's own handshake metadata, None where it has none."""

    children: tuple[KVConnectorHandshakeMetadata | None, ...]


class MultiKVEvents(KVConnectorKVEvents):  # type: ignore[misc, unused-ignore]
    """Each child's own container of KV cache events.

    vLLM adds ranks up by feeding one rank's ``get_all_events`` to another's ``add_events``, and never looks inside. So
    an "event" here is a child's index with its whole container. Each child's containers are added up by its rules.
    """

    def __init__(self, children: dict[int, KVConnectorKVEvents]) -> None:
        self.children = children
        self._num_workers = 1

    def add_events(self, events: Iterable[Any]) -> None:
        """A child's container that raises is logged once; what it did not take is lost, and nothing else."""
        for index, theirs in events:
            if (mine := self.children.get(index)) is None:
                self.children[index] = theirs
                continue
            with harmless(f"KV cache events of child {index} could not be added up. Some are lost."):
                mine.add_events(theirs.get_all_events())
                mine.increment_workers(theirs.get_number_of_workers())

    def get_all_events(self) -> list[Any]:
        return list(self.children.items())

    def aggregate(self) -> "MultiKVEvents":
        aggregated: dict[int, KVConnectorKVEvents] = {}
        for index, events in self.children.items():
            with harmless(f"KV cache events of child {index} could not be aggregated. They are lost."):
                aggregated[index] = events.aggregate()
        return MultiKVEvents(aggregated)

    def increment_workers(self, count: int = 1) -> None:
        """``add_events`` has counted each child's workers, so a rank where a child had none does not count for it."""
        self._num_workers += count

    def get_number_of_workers(self) -> int:
        return self._num_workers

    def clear_events(self) -> None:
        for index, events in self.children.items():
            with harmless(f"KV cache events of child {index} could not be cleared."):
                events.clear_events()
