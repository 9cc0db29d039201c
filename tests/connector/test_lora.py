# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters without vLLM's engine: whose objects a lookup finds, which are stored, and what a digest depends on.

Reports may come when the next step is planned already, as with asynchronous scheduling.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from tests.connector.fake_stream import UNIT, FakeStream, FakeTier
from tests.connector.harness import HYBRID, NOTHING, Harness
from vllm_overlay.connector.lora.digests import AdapterReports, LoadedAdapters
from vllm_overlay.connector.lora.keys import AdapterKeys, LoraNames
from vllm_overlay.connector.lora.metadata import AdapterCheck, AdapterWeights
from vllm_overlay.connector.metadata import OffloadMetadata, OffloadWorkerMetadata, StoreJob
from vllm_overlay.connector.worker import OffloadWorker
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tally import Tally
from vllm_overlay.tiers.base import StoreTicket
from vllm_overlay.transfer.base import Placement, Span

OBJECT = PlannedObject(ObjectId("f0", b"k"), (), 0, 64, UNIT)
PLACE = Placement(spans=(Span(0, 1, 0, 64),))
ONE, OTHER = AdapterWeights(1, b"1" * 32), AdapterWeights(1, b"2" * 32, is_only=False)


def adapter_model(nudge: float = 0.0, scaling: float = 2.0, part: str = "q_proj", **changes: Any) -> Any:
    """Looks like vLLM's LoRAModel as it is read from its files."""
    a, b = torch.ones(8, 16, dtype=torch.bfloat16), torch.zeros(32, 8, dtype=torch.bfloat16)
    b[31, 7] += nudge
    layer = SimpleNamespace(rank=8, scaling=scaling, lora_a=a, lora_b=b)
    return SimpleNamespace(
        **{"loras": {f"layers.0.{part}": layer}, "modules_to_save": {}, "is_3d_lora_weight": False, **changes}
    )


def named(name: str = "a", path: str = "/a", adapter_id: int = 1) -> Any:
    return SimpleNamespace(lora_int_id=adapter_id, lora_name=name, lora_path=path)


@pytest.fixture
def made() -> Harness:
    return Harness()


def known(made: Harness, *loaded: AdapterWeights) -> Harness:
    """The workers have reported these."""
    made.idle_step(*loaded)
    return made


# Names.


def test_keys_differ_with_the_weights_and_with_the_hash_and_grow_with_the_request() -> None:
    hashes = [b"a", b"b"]
    keys, others = AdapterKeys(hashes, b"1" * 32), AdapterKeys(hashes, b"2" * 32)
    assert len({*hashes, *keys, *others}) == 6
    hashes.append(b"c")
    assert (len(keys), keys[-1], keys[1:]) == (3, keys[2], [keys[1], keys[2]])
    assert tuple(keys) == tuple(AdapterKeys(hashes, b"1" * 32))


# What the scheduler's half does.


def test_what_one_adapter_has_stored_neither_another_nor_the_base_model_finds(made: Harness) -> None:
    two = AdapterWeights(2, b"2" * 32)
    known(made, ONE, two)
    request = made.request("p", adapter_id=1)
    assert made.scheduler.lookup(request, 0) == 0
    assert made.step(request, 140) == 2
    found = [made.scheduler.lookup(made.request("p", adapter_id=adapter_id), 0) for adapter_id in (0, 1, 2)]
    assert found == [0, 128, 0]
    known(made, OTHER)  # other weights under the same id
    assert made.scheduler.lookup(made.request("p", adapter_id=1), 0) == 0
    known(made, AdapterWeights(7, ONE.digest))  # the same weights under another id
    assert made.scheduler.lookup(made.request("p", adapter_id=7), 0) == 128


def test_an_unknown_adapter_is_waited_for_during_one_step_only(made: Harness) -> None:
    first, second = made.request("p", adapter_id=1), made.request("q", adapter_id=1)
    assert [made.scheduler.lookup(request, 0) for request in (first, second, first)] == [None] * 3
    made.idle_step()
    assert [made.scheduler.lookup(request, 0) for request in (first, second)] == [0, 0]
    assert made.tally.counters["lookup_limits:adapter"] == 2
    made.idle_step()
    assert made.scheduler.lookup(made.request("r", adapter_id=1), 0) == 0


def test_an_adapter_loaded_ahead_of_its_requests_is_known_after_that_step(made: Harness) -> None:
    known(made, ONE)
    request = made.looked_up("p", adapter_id=1)
    made.step(request, 140)
    anew = Harness(made.tier)  # the scheduler's half after a restart, with what the tier has kept
    again = anew.request("p", adapter_id=1)
    assert anew.scheduler.lookup(again, 0) is None
    anew.idle_step(ONE)
    assert anew.scheduler.lookup(again, 0) == 128


def test_a_request_is_stored_no_more_when_its_adapter_changes(made: Harness) -> None:
    known(made, ONE)
    request = made.looked_up("p", adapter_id=1)
    assert made.step(request, 70, OTHER) == 1
    assert made.step(request, 70) == 0
    request.num_computed_tokens = 0  # preempted
    assert made.scheduler.lookup(request, 0) == 0
    assert made.step(request, 140) == 2


def test_a_local_hit_of_unknown_weights_is_neither_completed_nor_stored(made: Harness) -> None:
    known(made, OTHER)
    request = made.looked_up("p", adapter_id=1)
    assert made.step(request, 140) == 2
    with_hit = made.request("p", adapter_id=1)
    assert made.scheduler.lookup(with_hit, 64) == 0
    with_hit.num_computed_tokens = 64
    assert made.step(with_hit, 70) == 0
    assert made.step(with_hit, 10, OTHER) == 0
    assert made.tally.counters["lookup_limits:adapter"] == 1
    assert made.scheduler.lookup(made.request("p", adapter_id=1), 0) == 128


def test_a_local_hit_that_the_lookup_is_not_told_of_is_not_stored(made: Harness) -> None:
    """vLLM asks from the last whole block, and takes its own partial block when that is longer."""
    known(made, OTHER)
    request = made.request("p", adapter_id=1)
    assert made.scheduler.lookup(request, 0) == 0
    request.num_computed_tokens = 48
    assert made.step(request, 92) == 0
    unknown = made.looked_up("q", adapter_id=2)
    unknown.num_computed_tokens = 48
    assert made.step(unknown, 20, AdapterWeights(2, b"2" * 32, is_only=False)) == 0
    assert made.step(unknown, 72) == 0
    again = made.request("p", adapter_id=1)
    assert made.scheduler.lookup(again, 0) == 0
    assert made.step(again, 140) == 2


@pytest.mark.parametrize(("weights", "num_local"), [(OTHER, 0), (ONE, 64)])
def test_what_was_restored_here_is_no_such_hit_and_one_of_the_only_weights_is_completed(
    made: Harness, weights: AdapterWeights, num_local: int
) -> None:
    known(made, weights)
    made.step(made.looked_up("p", adapter_id=1), 140)
    longer = made.request("p", num_tokens=256, adapter_id=1)
    assert made.scheduler.lookup(longer, num_local) == 128 - num_local
    made.scheduler.allocated(longer, [[1, 2, 3, 4]], 128 - num_local)
    longer.num_computed_tokens = 128
    assert made.step(longer, 70) == 1


@pytest.mark.parametrize(("adapter_id", "weights", "completes"), [(0, ONE, True), (1, ONE, True), (1, OTHER, False)])
def test_attention_on_the_device_that_other_weights_may_have_computed_is_loaded_too(
    adapter_id: int, weights: AdapterWeights, completes: bool
) -> None:
    """Without its state, lookups do not hear of it as a local hit."""
    made = known(Harness(geometry=HYBRID), weights)
    made.report(made.plan(made.looked_up("p", adapter_id=adapter_id), 140, states_at=128))
    request = made.request("p", adapter_id=adapter_id)
    assert made.scheduler.lookup(request, 0) == 128
    assert made.scheduler.completes_local_attention(request) is completes


def test_after_a_reset_a_request_whose_adapter_comes_to_be_known_is_not_stored(made: Harness) -> None:
    request = made.looked_up("p", adapter_id=1)
    made.scheduler.clear()
    assert made.step(request, 140, ONE) == 0
    assert made.step(request, 50) == 0


def test_ranks_must_agree(made: Harness) -> None:
    adapters = LoraNames(world_size=2)
    changed_since = AdapterWeights(1, ONE.digest, generation=3)
    one, other, later = (
        OffloadWorkerMetadata(adapters=Counter([weights]), step=1) for weights in (ONE, OTHER, changed_since)
    )

    def loaded() -> AdapterWeights | None:
        return adapters.names(made.request("p", adapter_id=1), 0).weights

    adapters.learn(1, one.aggregate(one).adapters)
    assert loaded() == ONE
    for another in (other, later, OffloadWorkerMetadata()):
        adapters.learn(1, one.aggregate(one).adapters)
        both = one.aggregate(another)
        adapters.learn(both.step, both.adapters)
        assert (both.step, loaded()) == (1, None)
    unread = OffloadWorkerMetadata(adapters=Counter([AdapterWeights(1, b"")]))
    adapters.learn(1, unread.aggregate(unread).adapters)
    assert loaded() is None


def test_a_restored_request_is_checked_in_the_first_pass_that_computes_it_and_only_there(made: Harness) -> None:
    known(made, ONE)
    for adapter_id in (0, 1):
        request = made.looked_up("p", adapter_id=adapter_id)
        made.step(request, 140)
    blocks = [[5, 6, 7, 8]]
    hidden = made.request("p", adapter_id=1)
    for name in ("plain", "restored", "preempted", "aborted", "hidden"):
        request = hidden if name == "hidden" else made.request("p", adapter_id=0 if name == "plain" else 1)
        request.request_id = name
        assert made.scheduler.lookup(request, 0) == 128
        made.scheduler.allocated(request, blocks, 128)
    assert len(made.scheduler.begin_step({"p": 1}).loads) == 5
    made.scheduler.lookup(request_like("preempted", made), 0)
    made.scheduler.finished("aborted")
    scheduled = dict.fromkeys(("plain", "restored", "preempted", "aborted"), 1)
    assert made.scheduler.begin_step(scheduled).checks == (AdapterCheck("restored", ONE, frozenset({5, 6})),)
    hidden.status = RequestStatus.RUNNING  # a MultiConnector does not show the step, because of store=false
    assert made.scheduler.begin_step(scheduled).checks == (AdapterCheck("hidden", ONE, frozenset({5, 6})),)
    assert made.scheduler.begin_step(scheduled).checks == ()


def request_like(name: str, made: Harness) -> Any:
    request = made.request("p", adapter_id=1)
    request.request_id = name
    return request


# What the worker's half does.


def worker_with(adapters: LoadedAdapters) -> tuple[OffloadWorker, FakeTier, FakeStream]:
    tier, stream = FakeTier(), FakeStream()
    stream.blocks[1] = bytes(UNIT)
    tally = Tally()
    return OffloadWorker(stream, tier, adapters, load_timeout_s=1000.0, tally=tally), tier, stream


def end_all(worker: OffloadWorker, stream: FakeStream) -> None:
    for handle in stream.in_flight:
        stream.end(handle)
    worker.advance()


def test_a_digest_depends_on_every_weight_on_names_scaling_type_and_settings() -> None:
    head = SimpleNamespace(weight=torch.ones(2, 2), bias=None)
    transposed = adapter_model()
    layer = transposed.loras["layers.0.q_proj"]
    layer.lora_a = layer.lora_a.reshape(16, 8)
    in_float = adapter_model()
    in_float.loras["layers.0.q_proj"].lora_a = torch.ones(8, 16, dtype=torch.float16)
    models = [
        adapter_model(), adapter_model(nudge=1.0), adapter_model(scaling=1.0), adapter_model(part="k_proj"),
        adapter_model(modules_to_save={"score": head}), adapter_model(is_3d_lora_weight=True), transposed, in_float,
    ]  # fmt: skip
    adapters, others = LoadedAdapters(), LoadedAdapters("max_lora_rank=64")
    for adapter_id, model in enumerate(models):
        adapters.heard(named(adapter_id=adapter_id), model)
        others.heard(named(adapter_id=adapter_id), model)
    digests = {weights.digest for weights in (*adapters.weights(), *others.weights())}
    assert len(digests) == 2 * len(models)
    adapters.heard(named(adapter_id=99), adapter_model())
    assert [weights.digest in digests for weights in adapters.weights()] == [True] * (len(models) + 1)


def test_news_of_an_adapter_are_told_once_by_each_connector_of_the_process() -> None:
    adapters = LoadedAdapters()
    worker, *_ = worker_with(adapters)
    assert worker.take_metadata() is None
    adapters.heard(named(), adapter_model())
    (first,) = adapters.weights()
    told = worker.take_metadata()
    assert told is not None and told.adapters == Counter([first])
    adapters.heard(named(), adapter_model())  # evicted and back, or in place and the same
    assert worker.take_metadata() is None
    adapters.heard(named("b", "/b", 2), adapter_model(nudge=1.0))
    told = worker.take_metadata()
    assert told is not None and {weights.adapter_id for weights in told.adapters} == {2}
    anew, *_ = worker_with(adapters)
    told = anew.take_metadata()
    assert told is not None and {weights.adapter_id for weights in told.adapters} == {1, 2}


def test_other_weights_of_one_name_and_path_are_told_whatever_their_id() -> None:
    adapters = LoadedAdapters()
    adapters.heard(named(), adapter_model())
    adapters.heard(named(adapter_id=2), adapter_model())
    assert [weights.is_only for weights in adapters.weights()] == [True, True]
    adapters.heard(named(adapter_id=3), adapter_model(nudge=1.0))
    adapters.heard(named(path="/elsewhere", adapter_id=4), adapter_model(nudge=1.0))
    assert [weights.is_only for weights in adapters.weights()] == [False, False, False, True]


def test_an_adapter_that_cannot_be_read_is_unknown_and_raises_nothing() -> None:
    adapters = LoadedAdapters()
    odd = adapter_model()
    odd.loras["layers.0.q_proj"].lora_a = [torch.ones(1)]
    adapters.heard(named(), odd)
    assert [weights.digest for weights in adapters.weights()] == [b""]


def test_objects_are_stored_only_while_their_weights_are_loaded() -> None:
    adapters = LoadedAdapters()
    adapters.heard(named(), adapter_model())
    (loaded,) = adapters.weights()
    worker, tier, stream = worker_with(adapters)
    jobs = tuple(
        StoreJob(StoreTicket(ticket, OBJECT), PLACE, weights)
        for ticket, weights in enumerate((None, loaded, AdapterWeights(1, b"x" * 32), AdapterWeights(2, loaded.digest)))
    )
    worker.store(jobs)
    end_all(worker, stream)
    assert list(tier.stored) == [0, 1]
    metadata = worker.take_metadata()
    assert metadata is not None and metadata.failed_stores == {2, 3}
    adapters.heard(named(adapter_id=2), adapter_model(nudge=1.0))  # of the same name and path
    worker.store(jobs[1:2])
    assert stream.in_flight == []


def test_blocks_restored_for_other_weights_are_reported_bad_in_that_pass() -> None:
    adapters = LoadedAdapters()
    adapters.heard(named(), adapter_model())
    (loaded,) = adapters.weights()
    worker, *_ = worker_with(adapters)
    worker.take_metadata()
    worker.check_adapters((AdapterCheck("good", loaded, frozenset({1, 2})),))
    assert (worker.take_bad_blocks(), worker.take_metadata()) == (set(), None)
    adapters.heard(named(), adapter_model(nudge=1.0))
    worker.check_adapters((AdapterCheck("bad", loaded, frozenset({3, 4})),))
    assert (worker.take_bad_blocks(), worker.take_bad_blocks()) == ({3, 4}, set())
    metadata = worker.take_metadata()
    assert metadata is not None and metadata.failed_loads == {"bad": "adapter"}
    assert worker.take_finished() == (set(), set())
    scheduler = Harness().scheduler
    request = Harness().request("bad", adapter_id=1)
    scheduler.lookup(request, 0)
    scheduler.update(NOTHING, metadata)
    assert scheduler._tracked["bad"].failed_loads == 1


# Reports that come late.

NUM_TOKENS = 400


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
    made.scheduler.update(NOTHING, OffloadWorkerMetadata(adapters=Counter([ONE, ONE]), step=first.step))
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
    report = OffloadWorkerMetadata(adapters=Counter([ONE, ONE]), step=first + reported_with)
    made.scheduler.update(NOTHING, report)
    assert len(made.plan(request, 10)) == stored


def test_a_step_of_an_unknown_number_names_nothing() -> None:
    made = Harness(num_concurrent_steps=2)
    request = made.request("p", adapter_id=1)
    made.scheduler._lora._asked[1] = -2
    made.scheduler.lookup(request, 0)
    made.plan(request, 70)
    made.scheduler.update(NOTHING, OffloadWorkerMetadata(adapters=Counter([ONE, ONE])))
    assert made.plan(request, 70) == ()
    assert OffloadMetadata().step == OffloadWorkerMetadata().step == 0
