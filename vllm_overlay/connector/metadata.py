# SPDX-License-Identifier: Apache-2.0
"""What travels between the scheduler's and the workers' halves of HybridOffloadConnector."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_overlay.common.reasons import Reason
from vllm_overlay.connector.lora.metadata import AdapterCheck, AdapterWeights
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tally import Tally
from vllm_overlay.tiers.base import LoadTicket, StoreTicket
from vllm_overlay.transfer.base import Placement, Span


class StoreJob(msgspec.Struct, frozen=True, gc=False):
    """Copy one object out of the KV cache within this pass, then keep it, if its adapter is still ``weights``."""

    ticket: StoreTicket
    placement: Placement
    weights: AdapterWeights | None = None


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Bring one request's objects into its blocks, then clear ``zeros``. ``load_id`` names this attempt. A request that
    is loaded again after a failure gets another one."""

    load_id: str
    request_id: str
    tickets: tuple[LoadTicket, ...]
    placements: tuple[Placement, ...]
    zeros: tuple[Span, ...]


@dataclass(slots=True)
class OffloadMetadata(KVConnectorMetadata):  # type: ignore[misc, unused-ignore]
    """Scheduler to workers, once a step.

    ``failed_loads`` are ids of requests whose load could not even be planned. ``step`` counts up from 1, and is 0 for a
    step that could not be planned. Workers say it with what they report, as vLLM may have planned the next step by
    then.

    ``overdue_stores`` are tickets and ``overdue_loads`` ids of requests, whose reports are missing. A worker says which
    of them it does not hold.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    failed_loads: tuple[str, ...] = ()
    checks: tuple[AdapterCheck, ...] = ()
    overdue_stores: tuple[int, ...] = ()
    overdue_loads: tuple[str, ...] = ()
    step: int = 0

    def __bool__(self) -> bool:
        """Whether the workers have something to do."""
        asked = self.checks or self.overdue_stores or self.overdue_loads
        return bool(self.loads or self.stores or self.failed_loads or asked)


@dataclass(slots=True)
class OffloadWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc, unused-ignore]
    """Workers to scheduler, once a step. vLLM aggregates the ranks' into one.

    ``step`` is that of the ``OffloadMetadata``. ``reported`` counts, by store ticket, the ranks that are done with it.
    ``failed_stores`` are those that failed in some rank. ``bad_objects`` did not verify in some rank,
    ``unreadable_objects`` could not be read in some. ``failed_loads`` maps request ids to a reason.

    For ``load_pause_s`` seconds every load would fail in some rank. 0.0 ends such a pause, None is no news.
    ``adapters`` counts the ranks that have newly loaded these weights. ``idle_stores`` and ``idle_loads`` count the
    ranks that hold nothing of what the scheduler asked about in this step. ``tally`` is what was counted.
    """

    reported: Counter[int] = field(default_factory=Counter)
    failed_stores: set[int] = field(default_factory=set)
    bad_objects: set[ObjectId] = field(default_factory=set)
    failed_loads: dict[str, Reason] = field(default_factory=dict)
    load_pause_s: float | None = None
    adapters: Counter[AdapterWeights] = field(default_factory=Counter)
    idle_stores: Counter[int] = field(default_factory=Counter)
    idle_loads: Counter[str] = field(default_factory=Counter)
    unreadable_objects: set[ObjectId] = field(default_factory=set)
    step: int = 0
    tally: Tally = field(default_factory=Tally)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "OffloadWorkerMetadata":
        """Called in the executor, with the metadata of another rank of the same step."""
        assert isinstance(other, OffloadWorkerMetadata)
        self.tally.add(other.tally)
        return OffloadWorkerMetadata(
            self.reported + other.reported,
            self.failed_stores | other.failed_stores,
            self.bad_objects | other.bad_objects,
            self.failed_loads | other.failed_loads,
            max((pause for pause in (self.load_pause_s, other.load_pause_s) if pause is not None), default=None),
            self.adapters + other.adapters,
            self.idle_stores + other.idle_stores,
            self.idle_loads + other.idle_loads,
            self.unreadable_objects | other.unreadable_objects,
            max(self.step, other.step),
            self.tally,
        )

    def __bool__(self) -> bool:
        stores, loads = (self.reported, self.failed_stores, self.idle_stores), (self.failed_loads, self.idle_loads)
        objects = self.bad_objects, self.unreadable_objects
        is_news = any((*stores, *loads, *objects, self.adapters)) or self.load_pause_s is not None
        return is_news or not self.tally.is_empty()


@dataclass(frozen=True, slots=True)
class OffloadHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc, unused-ignore]
    """Worker to scheduler, once at start: what only a worker knows, which must be equal in all ranks. ``tier_part`` is
    the tier's own."""

    geometry: Geometry
    tier_part: Any = None
