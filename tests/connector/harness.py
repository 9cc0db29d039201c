# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler half over a CPU tier, without vLLM's engine."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from tests.naive_twin import block_hashes
from vllm_overlay.connector.metadata import AdapterWeights, OffloadWorkerMetadata, StoreJob
from vllm_overlay.connector.metrics import OffloadStats
from vllm_overlay.connector.scheduler import OffloadScheduler
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.tiers.cpu import CpuTierManager

GEOMETRY = Geometry.build([Group(0, GroupKind.FULL, 64, 8, 512, True)], 16, 64)
NOTHING: Any = SimpleNamespace(finished_recving=None)


class Harness:
    """A scheduler half over a CPU tier, and requests as it sees them."""

    def __init__(self) -> None:
        self.stats = OffloadStats.make("test")
        self.tier = CpuTierManager(num_units=64, unit_bytes=512, world_size=2)
        self.scheduler = OffloadScheduler(
            GEOMETRY, self.tier, 2, max_load_attempts=3, report_timeout_s=100, stats=self.stats
        )  # fmt: skip

    def request(self, name: str, num_tokens: int = 200, adapter_id: int = 0) -> Any:
        hashes = block_hashes(name.encode() * 50)[: num_tokens // 16]
        adapter = SimpleNamespace(lora_int_id=adapter_id) if adapter_id else None
        return SimpleNamespace(
            request_id=name, block_hashes=hashes, num_tokens=num_tokens, num_computed_tokens=0,
            shared_prefix_boundary=0, lora_request=adapter,
        )  # fmt: skip

    def step(self, request: Any, num_tokens: int, *loaded: AdapterWeights) -> int:
        """Computes so many tokens; returns how many stores that brought. The workers report all at once, and what
        adapters they have loaded."""
        return len(self.jobs_of_step(request, num_tokens, *loaded))

    def jobs_of_step(self, request: Any, num_tokens: int, *loaded: AdapterWeights) -> tuple[StoreJob, ...]:
        state = SimpleNamespace(boundary_state_offloads={}, get_block_ids=lambda _: [[1, 2, 3, 4]])
        output: Any = SimpleNamespace(
            num_scheduled_tokens={request.request_id: num_tokens}, kv_connector_block_state=state
        )
        self.scheduler.begin_step(output.num_scheduled_tokens)
        jobs = self.scheduler.plan_stores(output)
        request.num_computed_tokens += num_tokens
        reported = Counter({job.ticket.ticket: 2 for job in jobs})
        self.scheduler.update(NOTHING, OffloadWorkerMetadata(reported, adapters=Counter(2 * loaded)))
        self.tier.index.check_integrity()
        return jobs

    def idle_step(self, *loaded: AdapterWeights) -> None:
        """A step that computes nothing."""
        self.scheduler.begin_step({})
        self.scheduler.update(NOTHING, OffloadWorkerMetadata(adapters=Counter(2 * loaded)))
        self.tier.index.check_integrity()
