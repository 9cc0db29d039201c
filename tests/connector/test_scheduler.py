# SPDX-License-Identifier: Apache-2.0
"""The connector's halves without vLLM's engine: resets, and ranks whose disk rests."""

from typing import Any

import pytest

from tests.connector.harness import NOTHING, Harness
from vllm_overlay.connector.lora.digests import LoadedAdapters
from vllm_overlay.connector.metadata import LoadJob, OffloadWorkerMetadata
from vllm_overlay.connector.metrics import OffloadStats
from vllm_overlay.connector.worker import OffloadWorker
from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.base import LoadTicket


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
