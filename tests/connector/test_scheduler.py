# SPDX-License-Identifier: Apache-2.0
"""The scheduler's half without vLLM's engine: resets, pauses, stores that fail, reports that do not come."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.connector.harness import GEOMETRY, NOTHING, Harness
from tests.naive_twin import block_hashes
from tests.tiers.entries import evict_one
from tests.tiers.integrity import check_integrity
from tests.tiers.store_tier import Address, StoreManager
from vllm_overlay.connector.metadata import OffloadWorkerMetadata, StoreJob
from vllm_overlay.connector.requests import StoreCursor
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.base import StoreTicket
from vllm_overlay.tiers.cpu import CpuTierManager
from vllm_overlay.tiers.disk.admission import UseCounter
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed


@pytest.fixture
def made() -> Harness:
    return Harness()


def test_what_any_rank_could_not_read_is_suspended_and_what_any_found_bad_is_dropped(
    made: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, both, unreadable = (ObjectId("f0", bytes([place])) for place in range(3))
    suspended: list[ObjectId] = []
    dropped: list[ObjectId] = []
    monkeypatch.setattr(made.tier, "suspend", suspended.append)
    monkeypatch.setattr(made.tier, "drop", dropped.append)
    one = OffloadWorkerMetadata(bad_objects={bad, both})
    other = OffloadWorkerMetadata(unreadable_objects={both, unreadable})
    assert other
    made.scheduler.update(NOTHING, one.aggregate(other))
    assert (sorted(dropped), suspended) == ([bad, both], [unreadable])


def test_what_was_begun_before_a_reset_is_not_stored_until_it_is_computed_anew(made: Harness) -> None:
    request = made.looked_up("p")
    assert made.step(request, 40) == 0
    made.scheduler.clear()
    assert made.step(request, 100) == 0  # its first chunk is half of before
    request.num_computed_tokens = 0  # preempted
    assert made.scheduler.lookup(request, 0) == 0
    assert made.step(request, 140) == 2
    assert made.scheduler.lookup(made.request("p"), 0) == 128


def test_while_a_rank_rests_nothing_is_offered_and_afterwards_again(made: Harness, now: list[float]) -> None:
    request = made.looked_up("p")
    made.step(request, 140)
    assert made.scheduler.lookup(made.request("p"), 0) == 128
    resting = OffloadWorkerMetadata(load_pause_s=4.0).aggregate(OffloadWorkerMetadata(load_pause_s=1.0))
    assert resting
    made.scheduler.update(NOTHING, resting)
    now[0] += 3.9
    assert made.scheduler.lookup(made.request("p"), 0) == 0
    assert made.tally.counters["lookup_limits:breaker"] == 1
    made.scheduler.update(NOTHING, OffloadWorkerMetadata().aggregate(OffloadWorkerMetadata()))
    assert made.scheduler.lookup(made.request("p"), 0) == 0
    now[0] += 0.2
    assert made.scheduler.lookup(made.request("p"), 0) == 128


def test_a_pause_ends_when_no_rank_rests_any_more(made: Harness) -> None:
    request = made.looked_up("p")
    made.step(request, 140)
    works, rests = OffloadWorkerMetadata(load_pause_s=0.0), OffloadWorkerMetadata(load_pause_s=60.0)
    made.scheduler.update(NOTHING, works.aggregate(rests))
    assert made.scheduler.lookup(made.request("p"), 0) == 0
    ended = works.aggregate(OffloadWorkerMetadata())
    assert ended
    made.scheduler.update(NOTHING, ended)
    assert made.scheduler.lookup(made.request("p"), 0) == 128


# Stores that fail, and reports that do not come.


def ends(jobs: tuple[StoreJob, ...]) -> list[int]:
    return [job.ticket.planned.end_tokens for job in jobs]


def test_after_a_store_that_a_rank_dropped_the_rest_of_the_prompt_is_found_all_the_same(made: Harness) -> None:
    request = made.looked_up("p", num_tokens=256)
    jobs = made.plan(request, 128)
    assert ends(jobs) == [64, 128]
    made.report(jobs, failed=jobs[:1])
    assert made.found("p") == 0
    assert ends(made.jobs_of_step(request, 64)) == [64]  # first the one that everything else hangs on
    assert ends(made.jobs_of_step(request, 1)) == [128, 192]
    assert made.found("p", num_tokens=256) == 192


def test_while_the_first_chunk_is_tried_again_nothing_after_it_is_stored(made: Harness) -> None:
    request = made.looked_up("p", num_tokens=256)
    first, second = made.plan(request, 128)
    made.report((first,), failed=(first,))
    retry = made.plan(request, 20)
    assert ends(retry) == [64]
    made.report((second,))
    assert made.plan(request, 20) == ()
    made.report(retry)
    assert ends(made.plan(request, 20)) == [128]


@pytest.mark.parametrize("num_dropped", [1, 12])
def test_however_many_chunks_a_step_drops_the_first_is_tried_in_the_next(num_dropped: int) -> None:
    made = Harness(CpuTierManager(256, 512, 2))
    request = made.looked_up("p", num_tokens=64 * 30)
    jobs = made.plan(request, 64 * 20)
    made.report(jobs, failed=jobs[-num_dropped:])
    assert ends(made.jobs_of_step(request, 1)) == [64 * (21 - num_dropped)]
    assert len(made.plan(request, 1)) == num_dropped - 1


def test_a_chunk_that_can_never_be_stored_does_not_make_the_others_be_stored_for_ever() -> None:
    made = Harness(CpuTierManager(256, 512, 2))
    request = made.looked_up("p", num_tokens=64 * 30)
    jobs, num_stores = made.plan(request, 64 * 20), 0
    for _ in range(60):
        num_stores += len(jobs)
        made.report(jobs, failed=tuple(job for job in jobs if job.ticket.planned.end_tokens == 192))
        jobs = made.plan(request, 1)
    assert num_stores < 20 + 10


@pytest.mark.parametrize("num_requests", [2, 4])
def test_requests_that_are_too_large_for_the_tier_together_do_not_evict_each_other_for_ever(num_requests: int) -> None:
    made = Harness(CpuTierManager(40, 512, 2))
    requests = [made.request(name, num_tokens=64 * 40) for name in "abcd"[:num_requests]]
    for request in requests:
        made.scheduler.lookup(request, 0)
    num_stores = []
    for step in range(200):
        jobs = made.plan(requests[0], 192 if step < 10 else 1, *requests[1:])
        num_stores.append(len(jobs))
        made.report(jobs)
        check_integrity(made.tier.index)
    assert sum(num_stores) > 40
    assert sum(num_stores[20:]) <= 2 * 40


class ByUse(CpuTierManager):
    """Stores an object when it could be stored for the second time."""

    def __init__(self) -> None:
        super().__init__(256, 512, 2)
        self._uses = UseCounter(2)

    def unwanted(self, object_ids: Sequence[ObjectId]) -> list[ObjectId]:
        return [object_id for object_id in object_ids if not self._uses.is_due(object_id)]


def test_a_chunk_that_is_tried_again_is_no_second_use_of_those_after_it() -> None:
    made = Harness(ByUse())
    one, other = made.request("p", num_tokens=128), made.request("p", num_tokens=256)
    other.request_id = "other"
    made.scheduler.lookup(one, 0)
    assert made.step(one, 128) == 0
    made.scheduler.lookup(other, 0)
    jobs = made.plan(other, 256)
    assert ends(jobs) == [64, 128]  # what they share; the rest is used for the first time
    made.report(jobs, failed=jobs[1:])
    assert ends(made.jobs_of_step(other, 1)) == [128]
    assert made.step(other, 1) == 0


def test_a_request_stores_the_beginning_that_it_had_left_to_another(made: Harness) -> None:
    one, other = made.request("p", num_tokens=256), made.request("p", num_tokens=256)
    other.request_id = "other"
    for request in (one, other):
        made.scheduler.lookup(request, 0)
    jobs = made.plan(one, 128)
    assert made.plan(other, 128) == ()  # both chunks are on their way
    made.report(jobs, failed=jobs)
    made.scheduler.finished("p")
    assert made.step(other, 64) == 0  # its third chunk has no parents: the cursor goes back
    assert ends(made.jobs_of_step(other, 1)) == [64, 128, 192]


def test_stores_that_fail_again_and_again_are_tried_ever_more_rarely(made: Harness) -> None:
    request = made.looked_up("p", num_tokens=64 + 200)
    jobs = made.plan(request, 64)
    steps = []
    for step in range(40):
        made.report(jobs, failed=jobs)
        jobs = made.plan(request, 1)
        steps += [step] if jobs else []
    assert steps == [0, 2, 6, 14, 30]
    while not jobs:
        jobs = made.plan(request, 0)
    made.report(jobs)
    assert made.found("p", num_tokens=264) == 64


@pytest.mark.parametrize(
    "output", [KVConnectorOutput(invalid_block_ids={7}), KVConnectorOutput(failed_recving={"another's"})]
)
def test_what_was_copied_out_of_a_pass_with_bad_blocks_is_not_kept(made: Harness, output: KVConnectorOutput) -> None:
    request = made.looked_up("p")
    jobs = made.plan(request, 140)
    made.scheduler.update(output, OffloadWorkerMetadata(Counter({job.ticket.ticket: 2 for job in jobs})))
    assert made.found("p") == 0
    assert made.tally.counters["dropped_stores:bad_blocks"] == 2
    request.num_computed_tokens = 0  # the scheduler starts it anew
    made.scheduler.lookup(request, 0)
    made.idle_step()
    assert made.step(request, 140) == 2
    assert made.found("p") == 128


def test_a_failed_load_that_its_request_still_waits_for_costs_no_store(made: Harness) -> None:
    request, waiting = made.request("p"), made.request("q")
    waiting.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    for one in (request, waiting):
        made.scheduler.lookup(one, 0)
    jobs = made.plan(request, 140)
    output = KVConnectorOutput(finished_recving={"q"}, failed_recving={"q"})
    made.scheduler.update(output, OffloadWorkerMetadata(Counter({job.ticket.ticket: 2 for job in jobs})))
    assert made.found("p") == 128


def test_an_overdue_store_is_waited_for_no_longer_and_its_memory_stays_taken(now: list[float]) -> None:
    made = Harness(report_timeout_s=100)
    request = made.looked_up("p")
    jobs = made.plan(request, 64)
    used = made.tier.usage().used_bytes
    assert made.scheduler.has_pending_work()
    now[0] += 101
    assert not made.scheduler.has_pending_work()
    assert made.tally.counters["dropped_stores:not_reported"] == 1
    assert made.tier.usage().used_bytes == used > 0  # a copy into it may still be under way
    made.report(jobs)  # at last
    assert made.tier.usage().used_bytes == 0
    assert made.found("p") == 0


def test_a_store_whose_report_was_lost_is_forgotten_once_no_rank_holds_it(now: list[float]) -> None:
    made = Harness(report_timeout_s=100)
    request = made.looked_up("p")
    (job,) = made.plan(request, 64)
    assert made.scheduler.begin_step({}).overdue_stores == ()
    now[0] += 101
    made.scheduler.has_pending_work()
    assert made.scheduler.begin_step({}).overdue_stores == (job.ticket.ticket,)
    one_rank = OffloadWorkerMetadata(idle_stores=Counter([job.ticket.ticket]))
    for _ in range(2):  # the other rank is copying still
        made.scheduler.update(NOTHING, one_rank)
    assert made.tier.usage().used_bytes > 0
    made.scheduler.update(NOTHING, one_rank.aggregate(one_rank))
    assert made.tier.usage().used_bytes == 0
    assert made.scheduler.begin_step({}).overdue_stores == ()
    assert made.step(request, 8) == 1  # its name is free again
    assert made.found("p") == 64


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_overdue_load_keeps_what_it_reads_until_it_has_ended_or_no_rank_holds_it(
    now: list[float], is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = Harness(report_timeout_s=100)
    made.store("p")
    made.loads("p")
    now[0] += 101
    assert not made.scheduler.has_pending_work()
    assert caplog.messages == ["Request p could not be restored (not_reported)"]
    assert made.tally.counters["failed_loads:not_reported"] == 1
    assert made.scheduler.begin_step({}).overdue_loads == ("p",)
    one_rank = OffloadWorkerMetadata(idle_loads=Counter(["p"]))
    made.scheduler.update(NOTHING, one_rank)
    used = made.tier.usage().used_bytes
    made.scheduler.clear()
    assert made.tier.usage().used_bytes == used > 0
    if is_lost:
        made.scheduler.update(NOTHING, one_rank.aggregate(one_rank))
    else:
        made.scheduler.update(KVConnectorOutput(finished_recving={"p"}), None)
    assert made.tier.usage().used_bytes == 0


@pytest.mark.parametrize("failed", [set(), {"another connector's"}])
def test_what_another_connector_has_received_changes_nothing(failed: set[str]) -> None:
    made = Harness()
    made.store("p")
    made.loads("p")
    made.scheduler.finished("p")
    before = made.tier.usage()
    output = KVConnectorOutput(finished_recving={"another connector's"}, failed_recving=failed)
    made.scheduler.update(output, None)
    assert made.tier.usage() == before and made.scheduler.has_pending_work()
    assert made.tally.counters.get("failed_loads:error", 0) == 0
    made.scheduler.update(KVConnectorOutput(finished_recving={"p"}), None)
    assert not made.scheduler.has_pending_work()


def test_an_answer_of_before_does_not_end_a_load_that_has_begun_since() -> None:
    made = Harness()
    made.store("p")
    made.loads("p", "again")
    made.scheduler.update(NOTHING, OffloadWorkerMetadata(idle_loads=Counter({"again": 2})))  # asked before this one
    made.scheduler.clear()
    assert made.scheduler.has_pending_work() and made.tier.usage().used_bytes
    made.scheduler.update(KVConnectorOutput(finished_recving={"again"}), None)
    assert not made.scheduler.has_pending_work() and not made.tier.usage().used_bytes


def test_a_retry_that_comes_after_unwanted_chunks_ends_when_it_is_stored() -> None:
    chunks = [
        HybridOffloadPlanner(GEOMETRY).chunk(block_hashes(b"p" * 400), GEOMETRY.full[0], index) for index in range(3)
    ]
    cursor = StoreCursor()
    cursor.submitted(chunks[2])
    cursor.failed(chunks[2], step=1)
    cursor.go_back(chunks[1])  # evicted meanwhile, and now not wanted by the tier
    cursor.submitted(chunks[2])
    assert not cursor.may_store(step=9)
    cursor.stored(chunks[2])
    assert cursor.may_store(step=9)


# What goes first when there is no room.


def full_tier() -> Harness:
    """Room for two chunks and no more: two prompts' worth of one chunk."""
    return Harness(CpuTierManager(num_units=2, unit_bytes=512, world_size=2))


@pytest.mark.parametrize("num_local", [64, 0], ids=["vLLM's own cache", "another connector's load"])
def test_what_a_request_used_from_elsewhere_stays_in_the_tier(num_local: int) -> None:
    made = full_tier()
    for name in ("used", "unused"):
        made.store(name, 64)
    request = made.request("used")
    request.request_id = "again"
    made.scheduler.lookup(request, num_local)
    made.scheduler.allocated(request, ([1], [1]), 0)
    made.store("new", 64)
    assert [made.found(name) for name in ("used", "unused", "new")] == [64, 0, 64]


@pytest.mark.parametrize("is_loaded_here", [True, False])
@pytest.mark.parametrize("num_local", [0, 64])
def test_a_request_that_goes_on_after_a_load_is_one_use_of_all_that_it_needs(
    is_loaded_here: bool, num_local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = LeastRecentlyUsed[Entry]()
    window = Group(1, GroupKind.WINDOW, 64, 8, 512, True, window=128)
    geometry = Geometry.build([*GEOMETRY.groups, window], 16, 64)
    made = Harness(CpuTierManager(64, 512, 2, policy), geometry=geometry)
    made.store("p")
    uses: Counter[tuple[str, int]] = Counter()
    monkeypatch.setattr(
        policy, "used", lambda entries: uses.update({(entry.object_id.tag, entry.end_tokens) for entry in entries})
    )
    request = made.request("p")
    request.request_id = "again"
    assert made.scheduler.lookup(request, num_local) == 128 - num_local
    made.scheduler.allocated(request, [[1, 2, 3, 4]] * 2, 128 - num_local if is_loaded_here else 0)
    made.scheduler.update(KVConnectorOutput(finished_recving={"again"}), None)
    made.scheduler.allocated(request, [[1, 2, 3, 4]] * 2, 0)  # vLLM's second call, after a load
    assert [uses[name] for name in (("f0", 128), ("w1", 64), ("w1", 128))] == [1, 1, 1]


def test_a_request_that_was_not_admitted_has_used_nothing() -> None:
    made = full_tier()
    for name in ("asked", "unused"):
        made.store(name, 64)
    assert made.found("asked") == 64
    made.store("new", 64)
    assert [made.found(name) for name in ("asked", "unused", "new")] == [0, 64, 64]


def fails(*_: object) -> NoReturn:
    raise KeyError


def test_an_exception_over_one_object_keeps_no_other_from_being_found(
    made: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = made.looked_up("p", num_tokens=256)
    jobs = made.plan(request, 192)
    assert ends(jobs) == [64, 128, 192]
    commit, last = made.tier.commit, jobs[-1].ticket.ticket

    def fails_for_the_last(ticket: int) -> None:
        if ticket == last:
            raise KeyError(ticket)
        commit(ticket)

    monkeypatch.setattr(made.tier, "commit", fails_for_the_last)
    monkeypatch.setattr(made.tier, "commit_all", fails)
    with pytest.raises(KeyError):
        made.report(jobs)
    assert made.found("p", num_tokens=256) == 128
    made.idle_step()  # nothing of it comes again
    assert not made.scheduler.has_pending_work()


def test_an_exception_over_all_at_once_is_seen_when_one_by_one_none_comes(
    made: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = made.plan(made.looked_up("p"), 140)
    monkeypatch.setattr(made.tier, "commit_all", fails)
    with pytest.raises(KeyError):
        made.report(jobs)
    assert made.found("p") == 128


def test_an_exception_over_a_store_keeps_no_load_from_ending(made: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    made.store("p")
    made.loads("p", "loads")
    request = made.looked_up("q")
    jobs = made.plan(request, 140)
    monkeypatch.setattr(made.tier, "commit_all", fails)
    monkeypatch.setattr(made.tier, "commit", fails)
    reported = OffloadWorkerMetadata(Counter({job.ticket.ticket: 2 for job in jobs}))
    with pytest.raises(KeyError):
        made.scheduler.update(KVConnectorOutput(finished_recving={"loads"}), reported)
    assert evict_one(made.tier.index) is not None, "the objects of a load that has ended are pinned"


class RefusesOnce(StoreManager):
    """Knows nothing of parents, and has no room for the second object that it is asked for."""

    asked = 0

    def reserve(self, planned: PlannedObject) -> StoreTicket | None:
        self.asked += 1
        return None if self.asked == 2 else super().reserve(planned)


def test_what_a_tier_grants_behind_a_chunk_that_found_no_room_does_not_hide_the_hole() -> None:
    tier: Any = RefusesOnce(Address(""), 1 << 20, 2)
    made = Harness(tier)
    request = made.looked_up("p", num_tokens=256)
    made.step(request, 192)
    made.step(request, 64)
    assert made.found("p", num_tokens=257) == 256


def test_while_a_tier_is_full_a_step_asks_for_the_first_chunk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Harness(CpuTierManager(num_units=2, unit_bytes=512, world_size=2))
    made.store("p")
    made.loads("p", "loads")  # so that nothing can go
    request = made.looked_up("q", num_tokens=2048)
    assert made.step(request, 1024) == 0
    asked: list[int] = []
    reserve_all = made.tier.reserve_all

    def counted(planned: Sequence[PlannedObject]) -> list[StoreTicket | None]:
        asked.append(len(planned))
        return reserve_all(planned)

    monkeypatch.setattr(made.tier, "reserve_all", counted)
    assert made.step(request, 512) == 0
    assert asked == [1]
    assert made.tally.counters["dropped_stores:no_room"] == 1


def test_what_finds_no_room_is_planned_in_each_step_of_a_prefill_and_ever_more_rarely_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Harness(CpuTierManager(num_units=2, unit_bytes=512, world_size=2))
    made.store("p")
    made.loads("p", "loads")  # so that nothing can go
    request = made.request("q", num_tokens=1024)
    request.num_prompt_tokens = 512
    made.scheduler.lookup(request, 0)
    planned: list[int] = []
    store_plan = HybridOffloadPlanner.store_plan

    def counted(self: HybridOffloadPlanner, keys: Any, cursors: Any, computed_tokens: int) -> list[PlannedObject]:
        planned.append(computed_tokens)
        return store_plan(self, keys, cursors, computed_tokens)

    monkeypatch.setattr(HybridOffloadPlanner, "store_plan", counted)
    assert sum(made.step(request, num_tokens) for num_tokens in [64] * 8 + [1] * 40) == 0
    assert planned == [*range(64, 513, 64), *(512 + step for step in (1, 2, 4, 8, 16, 32))]
    made.scheduler.update(KVConnectorOutput(finished_recving={"loads"}), None)
    assert sum(made.step(request, 1) for _ in range(32)) == 2
