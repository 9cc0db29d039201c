# SPDX-License-Identifier: Apache-2.0
"""The connector's halves without vLLM's engine: resets, and ranks whose disk rests."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.naive_twin import block_hashes
from vllm_overlay.connector.lora.digests import LoadedAdapters
from vllm_overlay.connector.metadata import AdapterWeights, LoadJob, OffloadWorkerMetadata, StoreJob
from vllm_overlay.connector.metrics import OffloadStats
from vllm_overlay.connector.scheduler import OffloadScheduler
from vllm_overlay.connector.worker import OffloadWorker
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.base import LoadTicket
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


@pytest.fixture
def made() -> Harness:
    return Harness()


def test_what_was_begun_before_a_reset_is_not_stored_until_it_is_computed_anew(made: Harness) -> None:
    request = made.request("p")
    made.scheduler.lookup(request, 0)
    assert made.step(request, 40) == 0
    made.scheduler.clear()
    assert made.step(request, 100) == 0  # its first chunk is half of before
    request.num_computed_tokens = 0  # preempted
    assert made.scheduler.lookup(request, 0) == 0
    assert made.step(request, 140) == 2
    assert made.scheduler.lookup(made.request("p"), 0) == 128


def test_a_request_that_comes_after_a_reset_is_stored(made: Harness) -> None:
    made.scheduler.lookup(made.request("old"), 0)
    made.scheduler.clear()
    request = made.request("p")
    made.scheduler.lookup(request, 0)
    assert made.step(request, 140) == 2


def test_while_a_rank_rests_nothing_is_offered_and_afterwards_again(
    made: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    request = made.request("p")
    made.scheduler.lookup(request, 0)
    made.step(request, 140)
    assert made.scheduler.lookup(made.request("p"), 0) == 128
    resting = OffloadWorkerMetadata(load_pause_s=4.0).aggregate(OffloadWorkerMetadata(load_pause_s=1.0))
    assert resting
    made.scheduler.update(NOTHING, resting)
    now[0] += 3.9
    assert made.scheduler.lookup(made.request("p"), 0) == 0
    assert made.stats.data["counters"]["lookup_limits:breaker"] == 1
    made.scheduler.update(NOTHING, OffloadWorkerMetadata().aggregate(OffloadWorkerMetadata()))
    assert made.scheduler.lookup(made.request("p"), 0) == 0
    now[0] += 0.2
    assert made.scheduler.lookup(made.request("p"), 0) == 128


def test_a_pause_ends_when_no_rank_rests_any_more(made: Harness) -> None:
    request = made.request("p")
    made.scheduler.lookup(request, 0)
    made.step(request, 140)
    works, rests = OffloadWorkerMetadata(load_pause_s=0.0), OffloadWorkerMetadata(load_pause_s=60.0)
    made.scheduler.update(NOTHING, works.aggregate(rests))
    assert made.scheduler.lookup(made.request("p"), 0) == 0
    ended = works.aggregate(OffloadWorkerMetadata())
    assert ended
    made.scheduler.update(NOTHING, ended)
    assert made.scheduler.lookup(made.request("p"), 0) == 128


class SilentTier:
    """A byte half that never answers."""

    def __init__(self) -> None:
        self.late: list[str] = []
        self.cancelled: list[str] = []

    def begin_load(self, load_id: str, tickets: object) -> None:
        pass

    def poll(self) -> tuple[list[Any], list[Any]]:
        return [], []

    def load_was_late(self, load_id: str) -> None:
        self.late.append(load_id)

    def cancel_load(self, load_id: str) -> None:
        self.cancelled.append(load_id)

    def load_pause_s(self) -> float:
        return 7.0 * len(self.late)


def test_a_late_load_is_told_to_the_tier_and_the_pause_to_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    tier: Any = SilentTier()
    transfer: Any = None
    worker = OffloadWorker(transfer, tier, LoadedAdapters(), load_timeout_s=5.0, stats=OffloadStats.make("test"))
    job = LoadJob("p#1", "p", (LoadTicket(0, ObjectId("f0", b"k"), 1),), (), ())
    worker.start_loads((job,), ())
    assert worker.take_metadata() is None
    now[0] += 5.1
    worker.advance()
    assert (tier.late, tier.cancelled) == (["p#1"], ["p#1"])
    assert worker.take_finished() == ({"p"}, {"p"})
    metadata = worker.take_metadata()
    assert metadata is not None
    assert (metadata.failed_loads, metadata.load_pause_s) == ({"p": "timeout"}, 7.0)
    tier.late.clear()
    ended = worker.take_metadata()
    assert ended is not None
    assert ended.load_pause_s == 0.0
    assert worker.take_metadata() is None
