# SPDX-License-Identifier: Apache-2.0
"""What travels between the scheduler's and the workers' halves of HybridOffloadConnector."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.base import LoadTicket, StoreTicket
from vllm_overlay.tiers.disk.namespace import DiskNamespace
from vllm_overlay.transfer.base import Placement, Span


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """What a rank has loaded under the id of a LoRA adapter.

    ``digest`` is of all its weights, empty when they could not be read. ``is_only`` says that nothing else was loaded
    under its name and path since the process began: what the device cache holds by these was computed with it.
    """

    adapter_id: int
    digest: bytes
    is_only: bool = True


@dataclass(frozen=True, slots=True)
class AdapterCheck:
    """A restored request that this pass computes with for the first time, and the blocks of what was loaded for it.

    They are bad unless its adapter is still ``weights``.
    """

    request_id: str
    weights: AdapterWeights
    block_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Copy one object out of the KV cache within this pass, then keep it, if its adapter is still ``weights``."""

    ticket: StoreTicket
    placement: Placement
    weights: AdapterWeights | None = None


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Bring one request's objects into its blocks, then clear ``zeros``.

    ``load_id`` names this attempt; a request that is loaded again after a failure gets another one.
    """

    load_id: str
    request_id: str
    tickets: tuple[LoadTicket, ...]
    placements: tuple[Placement, ...]
    zeros: tuple[Span, ...]


@dataclass(slots=True)
class OffloadMetadata(KVConnectorMetadata):
    """Scheduler to workers, once a step. ``failed_loads`` are request ids whose load could not even be planned."""

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    failed_loads: tuple[str, ...] = ()
    checks: tuple[AdapterCheck, ...] = ()


@dataclass(slots=True)
class OffloadWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, once a step; vLLM aggregates the ranks' into one.

    ``reported`` counts, by store ticket, the ranks that are done with it; ``failed_stores`` are those that failed in
    some rank. ``bad_objects`` did not verify in some rank; ``failed_loads`` maps request ids to a reason. For
    ``load_pause_s`` seconds every load would fail in some rank; 0.0 ends such a pause, None is no news. ``adapters``
    counts the ranks that have newly loaded these weights.
    """

    reported: Counter[int] = field(default_factory=Counter)
    failed_stores: set[int] = field(default_factory=set)
    bad_objects: set[ObjectId] = field(default_factory=set)
    failed_loads: dict[str, str] = field(default_factory=dict)
    load_pause_s: float | None = None
    adapters: Counter[AdapterWeights] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "OffloadWorkerMetadata":
        """Called in the executor, with the metadata of another rank of the same step."""
        assert isinstance(other, OffloadWorkerMetadata)
        return OffloadWorkerMetadata(
            self.reported + other.reported,
            self.failed_stores | other.failed_stores,
            self.bad_objects | other.bad_objects,
            self.failed_loads | other.failed_loads,
            max((pause for pause in (self.load_pause_s, other.load_pause_s) if pause is not None), default=None),
            self.adapters + other.adapters,
        )

    def __bool__(self) -> bool:
        reports = (self.reported, self.failed_stores, self.bad_objects, self.failed_loads, self.adapters)
        return any(reports) or self.load_pause_s is not None


@dataclass(frozen=True, slots=True)
class OffloadHandshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once at start: what only a worker knows.

    ``num_units`` and ``unit_bytes`` describe the CPU tier's arena in one rank; ``namespace`` is the disk tier's.
    """

    rank: int
    geometry: Geometry
    num_units: int = 0
    unit_bytes: int = 0
    namespace: DiskNamespace | None = None
