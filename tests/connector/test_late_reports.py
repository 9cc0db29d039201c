# SPDX-License-Identifier: Apache-2.0
"""Reports that come when the next step is planned already, as with asynchronous scheduling: adapters and lost loads."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.outputs import KVConnectorOutput

from tests.connector.adapter_models import adapter_model, named
from tests.connector.harness import NOTHING, Harness
from vllm_overlay.connector.lora.digests import AdapterReports, LoadedAdapters
from vllm_overlay.connector.lora.metadata import AdapterWeights
from vllm_overlay.connector.metadata import OffloadMetadata, OffloadWorkerMetadata

NUM_TOKENS = 400
FIRST = AdapterWeights(1, b"1" * 32)


@dataclass
class Engine:
    """Two ranks with one adapter, whose weights change between passes, and steps that are reported later.

    ``wrong`` names what was stored under the name of weights that have not computed all of it.
    """

    made: Harness = field(default_factory=lambda: Harness(num_concurrent_steps=2))
    adapters: LoadedAdapters = field(default_factory=LoadedAdapters)
    version: int = 0
    requests: dict[str, Any] = field(default_factory=dict)
    computed_by: dict[str, list[int]] = field(default_factory=dict)
    stored: int = 0
    wrong: list[str] = field(default_factory=list)
    _digests: dict[bytes, int] = field(default_factory=dict)
    _unreported: deque[OffloadWorkerMetadata] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._reports = AdapterReports(self.adapters)
        self.load(0)

    def load(self, version: int) -> None:
        self.version = version
        self.adapters.heard(named(), adapter_model(nudge=float(version)))
        (weights,) = self.adapters.weights()
        self._digests[weights.digest] = version

    def step(self, num_tokens: int) -> None:
        """Every request that is let in computes so many tokens."""
        running = [request for request in self.requests.values() if request.num_computed_tokens < NUM_TOKENS]
        jobs = self.made.plan(running[0], num_tokens, *running[1:]) if running else ()
        if not running:
            self.made.step_number = self.made.scheduler.begin_step({}).step
        for request in running:
            self.computed_by[request.request_id] += [self.version] * num_tokens
        report = OffloadWorkerMetadata(step=self.made.step_number)
        for job in jobs:
            ticket = job.ticket.ticket
            report.reported[ticket] = 2
            assert job.weights is not None
            if not self.adapters.have_still(job.weights):
                report.failed_stores.add(ticket)
                continue
            self.stored += 1
            planned = self.made.scheduler._pending._stores[ticket]
            by = set(self.computed_by[planned.request_id][: planned.planned.end_tokens])
            if by != {self._digests[job.weights.digest]}:
                self.wrong.append(f"{planned.request_id}, up to {planned.planned.end_tokens}: {by}")
        report.adapters = Counter(dict.fromkeys(self._reports.take_changes(), 2))
        self._unreported.append(report)
        while len(self._unreported) > 1:
            self.report()

    def report(self) -> None:
        if self._unreported:
            self.made.scheduler.update(NOTHING, self._unreported.popleft())

    def admit(self) -> None:
        """A request comes. One whose adapter is not known yet may be asked again after a step."""
        name = f"request {len(self.requests)}"
        request = self.made.request(name, NUM_TOKENS, adapter_id=1)
        while self.made.scheduler.lookup(request, 0) is None:
            self.step(16)
        self.requests[name] = request
        self.computed_by[name] = []


ACTIONS = st.one_of(
    st.tuples(st.just("load"), st.integers(0, 2)),
    st.tuples(st.just("step"), st.sampled_from([16, 48, 64, 80])),
    st.tuples(st.just("step"), st.sampled_from([16, 48, 64, 80])),
    st.tuples(st.just("admit")),
    st.tuples(st.just("report")),
)


@given(st.lists(ACTIONS, max_size=40))
def test_nothing_is_named_by_weights_that_have_not_computed_it(actions: list[Any]) -> None:
    engine = Engine()
    for name, *arguments in actions:
        getattr(engine, name)(*arguments)
    assert engine.wrong == []


def test_an_adapter_that_stays_is_stored_all_along() -> None:
    engine = Engine()
    engine.admit()
    for _ in range(6):
        engine.step(64)
    assert (engine.stored, engine.wrong) == (6, [])


def test_what_weights_computed_that_came_and_went_between_two_reports_is_not_stored() -> None:
    engine = Engine()
    engine.load(1)
    engine.admit()
    engine.step(64)
    engine.load(0)
    engine.step(48)
    engine.load(1)
    engine.step(64)  # planned before anything was heard of the other weights
    assert (engine.stored, engine.wrong) == (1, [])


def test_an_adapter_loaded_ahead_is_waited_for_until_the_step_after_its_request_is_reported() -> None:
    made = Harness(num_concurrent_steps=2)
    request = made.request("p", adapter_id=1)
    made.idle_step()
    assert made.scheduler.lookup(request, 0) is None
    first = made.scheduler.begin_step({})
    assert made.scheduler.lookup(request, 0) is None
    made.scheduler.begin_step({})
    made.scheduler.update(NOTHING, OffloadWorkerMetadata(adapters=Counter([FIRST, FIRST]), step=first.step))
    assert made.scheduler.lookup(request, 0) == 0
    assert len(made.plan(request, 140)) == 2


@pytest.mark.parametrize(("reported_with", "stored"), [(-1, 1), (0, 1), (1, 0)])
def test_a_request_is_stored_once_the_adapter_of_its_first_pass_is_known_and_of_no_later_one(
    reported_with: int, stored: int
) -> None:
    made = Harness(num_concurrent_steps=2)
    request = made.request("p", num_tokens=400, adapter_id=1)
    made.scheduler._lora._asked[1] = -2  # not waited for
    made.idle_step()
    assert made.scheduler.lookup(request, 0) == 0
    assert made.plan(request, 70) == ()
    first = made.step_number
    assert made.plan(request, 10) == ()
    report = OffloadWorkerMetadata(adapters=Counter([FIRST, FIRST]), step=first + reported_with)
    made.scheduler.update(NOTHING, report)
    assert len(made.plan(request, 10)) == stored


def test_a_step_of_an_unknown_number_names_nothing() -> None:
    made = Harness(num_concurrent_steps=2)
    request = made.request("p", adapter_id=1)
    made.scheduler._lora._asked[1] = -2
    made.scheduler.lookup(request, 0)
    made.plan(request, 70)
    made.scheduler.update(NOTHING, OffloadWorkerMetadata(adapters=Counter([FIRST, FIRST])))
    assert made.plan(request, 70) == ()
    assert OffloadMetadata().step == OffloadWorkerMetadata().step == 0


def test_ranks_must_agree_on_how_often_the_weights_have_changed() -> None:
    made = Harness()
    again = AdapterWeights(1, FIRST.digest, generation=3)
    one, other = (OffloadWorkerMetadata(adapters=Counter([weights]), step=1) for weights in (FIRST, again))
    made.idle_step()
    made.scheduler.update(NOTHING, one.aggregate(other))
    assert one.aggregate(other).step == 1
    assert made.scheduler.lookup(made.request("p", adapter_id=1), 0) is None


def test_an_answer_of_before_does_not_end_a_load_that_has_begun_since() -> None:
    made = Harness()
    made.store("p")
    made.loads("p", "again")
    made.scheduler.update(NOTHING, OffloadWorkerMetadata(idle_loads=Counter({"again": 2})))  # asked before this one
    made.scheduler.clear()
    assert made.scheduler.has_pending_work() and made.tier.usage().used_bytes
    made.scheduler.update(KVConnectorOutput(finished_recving={"again"}), None)
    assert not made.scheduler.has_pending_work() and not made.tier.usage().used_bytes
