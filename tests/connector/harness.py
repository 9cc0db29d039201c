# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half over a CPU tier, without vLLM's engine, and requests as it sees them."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, Literal

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.naive_twin import block_hashes
from vllm_overlay.config import TierSettings
from vllm_overlay.connector.lora.metadata import AdapterWeights
from vllm_overlay.connector.metadata import OffloadWorkerMetadata, StoreJob
from vllm_overlay.connector.scheduler import OffloadScheduler
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.tally import Tally
from vllm_overlay.tiers.cpu import CpuTierManager

GEOMETRY = Geometry.build([Group(0, GroupKind.FULL, 64, 8, 512, True)], 16, 64)
HYBRID = Geometry.build([*GEOMETRY.groups, Group(1, GroupKind.RECURRENT, 64, 0, 512, False)], 16, 64)
"""The same attention beside states."""
NOTHING: Any = KVConnectorOutput()
"""What vLLM reports of a step in which no load ended."""


class Harness:
    """Two ranks; every request has the same blocks, of 64 tokens."""

    def __init__(
        self,
        tier: CpuTierManager | None = None,
        report_timeout_s: float = 100.0,
        *,
        geometry: Geometry = GEOMETRY,
        num_concurrent_steps: int = 1,
        store_decoded_tokens: bool | Literal["auto"] = "auto",
        speculative_snapshot_tokens: int = 0,
        log_lost_tokens: int = 0,
        lookahead_units: int = 0,
    ) -> None:
        self.tally = Tally()
        self.tier = tier or CpuTierManager(num_units=64, unit_bytes=512, world_size=2)
        self.step_number = 0
        self.scheduler = OffloadScheduler(
            geometry,
            self.tier,
            2,
            TierSettings(
                tier="cpu",
                name="test",
                store_decoded_tokens=store_decoded_tokens,
                report_timeout_s=report_timeout_s,
                log_lost_tokens=log_lost_tokens,
            ),
            self.tally,
            speculative_snapshot_tokens=speculative_snapshot_tokens,
            num_concurrent_steps=num_concurrent_steps,
            lookahead_units=lookahead_units,
        )

    def request(self, name: str, num_tokens: int = 200, adapter_id: int = 0) -> Any:
        hashes = block_hashes(name.encode() * max(50, num_tokens))[: num_tokens // 16]
        adapter = SimpleNamespace(lora_int_id=adapter_id) if adapter_id else None
        return SimpleNamespace(
            request_id=name, block_hashes=hashes, num_tokens=num_tokens, num_prompt_tokens=num_tokens,
            num_computed_tokens=0, shared_prefix_boundary=0, lora_request=adapter,
            num_output_tokens=0, arrival_time=0.0, status=RequestStatus.WAITING,
        )  # fmt: skip

    def looked_up(self, name: str, num_tokens: int = 200, adapter_id: int = 0) -> Any:
        """A request that vLLM has asked about once, and that hits nothing of its own."""
        request = self.request(name, num_tokens, adapter_id)
        self.scheduler.lookup(request, 0)
        return request

    def loads(self, name: str = "p", request_id: str = "") -> Any:
        """A request that loads what is stored of that prompt, 128 tokens."""
        request = self.request(name)
        request.request_id = request_id or name
        assert self.scheduler.lookup(request, 0) == 128
        self.scheduler.allocated(request, [[1, 2, 3, 4]], 128)
        return request

    def plan(self, request: Any, num_tokens: int, *others: Any, states_at: int = 0) -> tuple[StoreJob, ...]:
        """The stores of a step that computes so many tokens of each request; nobody has reported them yet.

        ``states_at`` is a boundary of the first request whose state vLLM offers.
        """
        requests = (request, *others)
        blocks = list(range(1, 1 + max(one.num_tokens for one in requests) // 64 + 1))
        offers = {request.request_id: [(1, blocks[-1], states_at)]} if states_at else {}
        state = SimpleNamespace(boundary_state_offloads=offers, get_block_ids=lambda _: [blocks, blocks])
        output: Any = SimpleNamespace(
            num_scheduled_tokens={one.request_id: num_tokens for one in requests}, kv_connector_block_state=state
        )
        self.step_number = self.scheduler.begin_step(output.num_scheduled_tokens).step
        jobs = self.scheduler.plan_stores(output)
        for one in requests:
            one.num_computed_tokens += num_tokens
        return jobs

    def report(self, jobs: tuple[StoreJob, ...], *loaded: AdapterWeights, failed: tuple[StoreJob, ...] = ()) -> None:
        """Both ranks have ended these stores, and say what adapters they have loaded."""
        self.scheduler.update(
            NOTHING,
            OffloadWorkerMetadata(
                Counter({job.ticket.ticket: 2 for job in jobs}),
                {job.ticket.ticket for job in failed},
                adapters=Counter(2 * loaded),
                step=self.step_number,
            ),
        )

    def jobs_of_step(self, request: Any, num_tokens: int, *loaded: AdapterWeights) -> tuple[StoreJob, ...]:
        """Computes so many tokens; the workers report all stores at once."""
        jobs = self.plan(request, num_tokens)
        self.report(jobs, *loaded)
        return jobs

    def step(self, request: Any, num_tokens: int, *loaded: AdapterWeights) -> int:
        """As ``jobs_of_step``; returns how many stores that brought."""
        return len(self.jobs_of_step(request, num_tokens, *loaded))

    def idle_step(self, *loaded: AdapterWeights) -> None:
        """A step that computes nothing."""
        self.step_number = self.scheduler.begin_step({}).step
        self.report((), *loaded)

    def store(self, name: str, num_tokens: int = 140) -> None:
        """A request of that prompt has come, computed so many tokens, and stored them."""
        self.step(self.looked_up(name), num_tokens)
        self.scheduler.finished(name)

    def found(self, name: str, **changes: Any) -> int | None:
        """What a lookup of that prompt by another request offers."""
        request = self.request(name, **changes)
        request.request_id = f"another {name}"
        return self.scheduler.lookup(request, 0)
