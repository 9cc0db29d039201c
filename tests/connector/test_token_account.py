# SPDX-License-Identifier: Apache-2.0
"""Every token that an admitted request asks for is counted once: restored, or lost for one reason."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.v1.outputs import KVConnectorOutput

from tests.connector.harness import HYBRID, NOTHING, Harness
from vllm_overlay.common.reasons import Reason
from vllm_overlay.connector.metadata import OffloadWorkerMetadata
from vllm_overlay.tally import Buckets

BLOCKS: Any = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]


def with_prompt() -> Harness:
    """A tier that holds 128 tokens of the prompt "p"; what that counted is forgotten."""
    made = Harness()
    made.store("p")
    made.tally.take()
    return made


def counters(made: Harness) -> dict[str, float]:
    return dict(made.tally.counters)


def lost(made: Harness) -> dict[str, float]:
    """Tokens by reason."""
    found = {key.partition(":")[2]: tokens for key, tokens in counters(made).items() if key.startswith("lost_tokens:")}
    return {reason: tokens for reason, tokens in found.items() if tokens}


def totals(made: Harness) -> tuple[float, float, float]:
    """Queried, restored, lost."""
    found = counters(made)
    return found.get("queried_tokens", 0), found.get("restored_tokens", 0), sum(lost(made).values())


def ended(made: Harness, name: str, failed: bool = False) -> None:
    """All ranks have reported the load of a request; one of them may have failed."""
    reason = {name: Reason.CHECKSUM} if failed else {}
    output: Any = KVConnectorOutput(finished_recving={name}, failed_recving={name} if failed else None)
    made.scheduler.update(output, OffloadWorkerMetadata(failed_loads=reason))


def reader(made: Harness, name: str = "p", num_tokens: int = 200) -> Any:
    """A request for a prompt that is looked up and not yet admitted."""
    request = made.request(name, num_tokens)
    request.request_id = f"reader of {name}"
    made.scheduler.lookup(request, 0)
    return request


def test_a_lookup_counts_when_its_request_is_admitted_and_once() -> None:
    made = Harness()
    request = reader(made, "fresh")
    for _ in range(3):
        made.scheduler.lookup(request, 0)
    assert totals(made) == (0, 0, 0)
    made.scheduler.allocated(request, BLOCKS, 0)
    made.scheduler.allocated(request, BLOCKS, 0)  # once more, after another connector's load
    assert totals(made) == (200, 0, 200)
    assert lost(made) == {"attention": 192, "prompt_end": 8}


def test_a_load_counts_when_it_has_ended_and_its_seconds_with_it() -> None:
    made = with_prompt()
    made.scheduler.allocated(request := reader(made), BLOCKS, 128)
    assert totals(made) == (0, 0, 0)
    ended(made, request.request_id)
    made.scheduler.allocated(request, BLOCKS, 0)  # it goes on with what was loaded
    assert totals(made) == (200, 128, 72)
    assert lost(made) == {"attention": 64, "prompt_end": 8}
    assert counters(made)["restored_requests"] == 1
    assert made.tally.histograms["load_seconds"].count == 1


def test_a_failed_load_loses_what_it_was_to_bring() -> None:
    made = with_prompt()
    made.scheduler.allocated(request := reader(made), BLOCKS, 128)
    ended(made, request.request_id, failed=True)
    assert lost(made) == {"load_failed": 128, "attention": 64, "prompt_end": 8}
    assert "restored_requests" not in counters(made) and "load_seconds" not in made.tally.histograms


def test_an_offer_that_is_not_taken_is_lost_for_that() -> None:
    made = with_prompt()
    made.scheduler.allocated(reader(made), BLOCKS, 0)
    assert lost(made) == {"not_taken": 128, "attention": 64, "prompt_end": 8}


def test_what_is_refused_before_the_lookup_is_lost_for_that() -> None:
    made = with_prompt()
    made.scheduler.update(NOTHING, OffloadWorkerMetadata(load_pause_s=60.0))
    made.scheduler.allocated(reader(made), BLOCKS, 0)
    made.scheduler.record_gauges()
    assert lost(made) == {"breaker": 200}
    assert made.tally.gauges["loads_paused"] == 1
    made.scheduler.update(NOTHING, OffloadWorkerMetadata(load_pause_s=0.0))
    made.scheduler.record_gauges()
    assert made.tally.gauges["loads_paused"] == 0


def test_a_request_whose_loads_fail_too_often_loses_all_to_its_attempts() -> None:
    made = with_prompt()
    request = reader(made)
    for _ in range(3):
        made.scheduler.allocated(request, BLOCKS, 128)
        ended(made, request.request_id, failed=True)
        made.scheduler.lookup(request, 0)
    made.scheduler.allocated(request, BLOCKS, 0)
    assert lost(made) == {"attempts": 200, "load_failed": 3 * 128, "attention": 3 * 64, "prompt_end": 3 * 8}


def test_a_load_that_fails_in_two_ranks_one_after_the_other_is_one_attempt() -> None:
    made = with_prompt()
    request = reader(made)
    for _ in range(2):
        made.scheduler.allocated(request, BLOCKS, 128)
        made.scheduler.update(NOTHING, OffloadWorkerMetadata(failed_loads={request.request_id: Reason.TIMEOUT}))
        ended(made, request.request_id, failed=True)
        assert made.scheduler.lookup(request, 0) == 128
    assert counters(made)["failed_loads:timeout"] == 2 and "failed_loads:checksum" not in counters(made)


def test_a_load_whose_objects_are_gone_is_a_failed_one() -> None:
    made = with_prompt()
    request = reader(made)
    made.scheduler.clear()
    made.scheduler.allocated(request, BLOCKS, 128)
    assert lost(made)["load_failed"] == 128


def test_a_request_that_a_multi_connector_hides_after_its_lookup_counts_when_it_is_over() -> None:
    made = Harness()
    computed, waiting = reader(made, "computed"), reader(made, "waiting")
    computed.num_computed_tokens = 200
    for request in (computed, waiting):
        made.scheduler.finished(request.request_id)
    assert totals(made) == (200, 0, 200)


class Requests(RuleBasedStateMachine):
    """Lookups, admissions, loads, failures and ends of a few requests, in any order that vLLM may have."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Harness(geometry=HYBRID)
        writer = self.made.request("p", 320)
        self.made.scheduler.lookup(writer, 0)
        self.made.report(self.made.plan(writer, 256, states_at=192))
        self.made.scheduler.finished("p")
        self.made.tally.take()
        self.waiting: dict[str, tuple[Any, int]] = {}
        self.running: dict[str, Any] = {}
        self.loading: dict[str, Any] = {}
        self.admitted_tokens = 0
        self.in_loads: Counter[str] = Counter()

    @rule(name=st.sampled_from("abc"), num_tokens=st.integers(1, 320), prompt=st.sampled_from("pq"))
    def comes(self, name: str, num_tokens: int, prompt: str) -> None:
        if not any(name in table for table in (self.waiting, self.running, self.loading)):
            request = self.made.request(prompt, num_tokens)
            request.request_id = name
            self.waiting[name] = request, self.made.scheduler.lookup(request, 0) or 0

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), takes=st.booleans(), repeats=st.booleans())
    def is_admitted(self, data: Any, takes: bool, repeats: bool) -> None:
        request, offered = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        if repeats:
            self.made.scheduler.lookup(request, 0)
        self.made.scheduler.allocated(request, BLOCKS, offered if takes else 0)
        if takes and offered:
            self.loading[request.request_id] = request
            self.in_loads[request.request_id] = request.num_tokens
        else:
            self.admitted_tokens += request.num_tokens
            self.running[request.request_id] = request

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), failed=st.booleans(), is_aborted=st.booleans())
    def load_ends(self, data: Any, failed: bool, is_aborted: bool) -> None:
        request = self.loading.pop(data.draw(st.sampled_from(sorted(self.loading))))
        if is_aborted:
            self.made.scheduler.finished(request.request_id)
        ended(self.made, request.request_id, failed)
        self.admitted_tokens += self.in_loads.pop(request.request_id)
        if failed and not is_aborted:
            self.waiting[request.request_id] = request, self.made.scheduler.lookup(request, 0) or 0
        elif not is_aborted:
            self.made.scheduler.allocated(request, BLOCKS, 0)
            self.running[request.request_id] = request

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_preempted=st.booleans())
    def ends(self, data: Any, is_preempted: bool) -> None:
        request = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        if is_preempted:
            self.waiting[request.request_id] = request, self.made.scheduler.lookup(request, 0) or 0
        else:
            request.num_computed_tokens = request.num_tokens
            self.made.scheduler.finished(request.request_id)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def is_aborted(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[name]
        self.made.scheduler.finished(name)

    @invariant()
    def the_sum_holds(self) -> None:
        queried, restored, lost_tokens = totals(self.made)
        assert queried == self.admitted_tokens == restored + lost_tokens


TestAnyOrder = Requests.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


def test_seconds_of_a_lookup_are_one_observation_each() -> None:
    made = Harness()
    for _ in range(3):
        reader(made)
    found = made.tally.histograms["lookup_seconds"]
    assert isinstance(found, Buckets) and found.count == 3


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_load_that_is_overdue_counts_when_it_has_ended_after_all(now: list[float], is_lost: bool) -> None:
    made = with_prompt()
    made.scheduler.allocated(request := reader(made), BLOCKS, 128)
    now[0] += 101.0
    made.scheduler.has_pending_work()
    assert totals(made) == (0, 0, 0)
    if is_lost:
        rank = OffloadWorkerMetadata(idle_loads=Counter([request.request_id]))
        made.scheduler.update(NOTHING, rank.aggregate(rank))
        assert lost(made)["load_failed"] == 128
    else:
        ended(made, request.request_id)
        assert totals(made) == (200, 128, 72)
        assert made.tally.histograms["load_seconds"].sum == 101.0


@pytest.mark.parametrize(("of_a_rank", "of_vllm"), [(True, None), (True, set()), (False, {"reader of p"})])
def test_a_failure_counts_whoever_reports_it(of_a_rank: bool, of_vllm: set[str] | None) -> None:
    """A rank at once, and perhaps before the others have ended; vLLM alone, from a MultiConnector that gave us up."""
    made = with_prompt()
    made.scheduler.allocated(request := reader(made), BLOCKS, 128)
    if of_a_rank:
        failed = OffloadWorkerMetadata(failed_loads={request.request_id: Reason.TIMEOUT})
        made.scheduler.update(NOTHING, failed)
    if of_vllm is not None:
        output: Any = KVConnectorOutput(finished_recving={request.request_id}, failed_recving=of_vllm)
        made.scheduler.update(output, None)
    assert totals(made) == (200, 0, 200) and lost(made)["load_failed"] == 128
