# SPDX-License-Identifier: Apache-2.0
"""A step from the scheduler to the workers and back: metadata, reports, events, handshakes, preemptions."""

import pickle

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.outputs import KVConnectorOutput

from tests.multi_connector.fakes import (
    ENDINGS,
    FAULTS,
    Boom,
    FakeEvents,
    FakeHandshake,
    FakeMetadata,
    FakeWorkerMetadata,
    breaking,
    child,
    multi,
    request,
    scheduler_output,
    worker,
)
from tests.multi_connector.lockstep import Lockstep
from vllm_overlay.multi_connector.hooks import LAYER_HOOKS
from vllm_overlay.multi_connector.metadata import MultiKVEvents, MultiWorkerMetadata
from vllm_overlay.named_child import QuietResults, QuietStep


@pytest.mark.parametrize("failed", [set(), {"r"}])
def test_a_load_is_done_when_its_child_says_so_and_counted_as_it_ended(failed):
    engine = Lockstep()
    engine.admit("r", 1)
    assert engine.step().finished_recving is None
    engine.report(1, recving={"r"}, failed=failed)
    output = engine.step()
    assert (output.finished_recving, output.failed_recving) == ({"r"}, failed)
    counted = engine.told("loaded_tokens", "b"), engine.told("failed_loads", "b")
    assert counted == ((0, 1) if failed else (64, 0))
    assert not engine.finish("r")
    assert engine.step().finished_sending is None
    assert engine.tables_are_empty()


def test_another_childs_or_a_repeated_report_of_a_load_is_ignored_and_counted():
    engine = Lockstep()
    engine.admit("r", 1)
    engine.report(0, recving={"r"})
    assert engine.step().finished_recving is None
    engine.report(1, recving={"r"})
    engine.step()
    engine.report(1, recving={"r"}, sending={"never"})
    output = engine.step()
    assert (output.finished_recving, output.finished_sending) == (None, None)
    assert [engine.told("ignored_reports", name) for name in "ab"] == [1, 2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_are_free_when_every_child_that_holds_them_has_reported_on_every_rank(ranks):
    engine = Lockstep(ranks=ranks)
    assert engine.finish("r", 0, 1)
    *others, last = [(rank, index) for rank in range(ranks) for index in (0, 1)]
    for rank, index in [*others, others[0]]:  # told twice, still one child
        engine.report(index, rank=rank, sending={"r"})
        assert engine.step().finished_sending is None
    engine.report(last[1], rank=last[0], sending={"r"})
    assert engine.step().finished_sending == {"r"}
    assert engine.tables_are_empty()


def test_a_child_that_took_the_partial_tail_and_the_request_owes_one_report():
    engine = Lockstep()
    engine.scheduler.sub_connectors[0].answers["register_finished_partial_tail"] = True
    assert engine.scheduler.register_finished_partial_tail(request("r"), ([1],), [(0, 1, 12)])
    assert engine.finish("r", 1)
    engine.report(1, sending={"r"})
    assert engine.step().finished_sending is None
    engine.report(0, sending={"r"})
    assert engine.step().finished_sending == {"r"}


def test_parameters_of_all_children_are_returned_and_the_first_of_equal_keys_wins():
    connector = multi()
    a, b = connector.sub_connectors
    a.answers["request_finished_all_groups"] = (False, {"x": 1, "y": 1})
    b.answers["request_finished_all_groups"] = (True, {"y": 2, "z": 2})
    assert connector.request_finished_all_groups(request(), ([1],)) == (True, {"x": 1, "y": 1, "z": 2})


def test_a_child_without_hybrid_support_gets_the_one_groups_blocks():
    connector = multi(child("a"), child("old", "PlainChild"), hybrid=False)
    a, old = connector.sub_connectors
    connector.request_finished_all_groups(request(), ([1, 2],))
    assert a.called("request_finished_all_groups")[0][1] == ([1, 2],)
    assert old.called("request_finished")[0][1] == [1, 2]


def test_each_child_sees_its_own_worker_metadata_and_saves_and_all_loads():
    engine = Lockstep()
    engine.admit("load", 0)
    engine.finish("save", 1)
    engine.workers[0].sub_connectors[1].answers["build_connector_worker_meta"] = FakeWorkerMetadata({"x"})
    engine.report(0, recving={"load"}, failed={"load"})
    engine.report(1, sending={"save"})
    engine.step()
    ((a,),), ((b,),) = (fake.called("update_connector_output") for fake in engine.scheduler.sub_connectors)
    assert (a.finished_recving, a.failed_recving, a.finished_sending) == ({"load"}, {"load"}, None)
    assert (b.finished_recving, b.failed_recving, b.finished_sending) == ({"load"}, {"load"}, {"save"})
    assert (a.kv_connector_worker_meta, b.kv_connector_worker_meta) == (None, FakeWorkerMetadata({"x"}))


@pytest.mark.parametrize("error", [*FAULTS, *ENDINGS])
def test_worker_metadata_that_cannot_be_added_up_isolates_its_child_unless_the_process_ends(error):
    broken = breaking(FakeWorkerMetadata(), "aggregate", error)
    bad = MultiWorkerMetadata((broken, FakeWorkerMetadata({"x"})))
    if error in ENDINGS:
        with pytest.raises(error):
            bad.aggregate(bad)
        return
    merged = bad.aggregate(bad)
    assert (merged.children, merged.broken) == ((None, FakeWorkerMetadata({"x"})), {0})


def test_events_of_the_scheduler_side_are_chained():
    connector = multi()
    x, y, z = (BlockRemoved(block_hashes=[i], medium=None) for i in range(3))
    connector.sub_connectors[0].answers["take_events"] = lambda: iter([x])
    connector.sub_connectors[1].answers["take_events"] = lambda: [y, z]
    assert list(connector.take_events()) == [x, y, z]
    connector.sub_connectors[0].answers["take_events"] = lambda: ["no event"]
    assert list(connector.take_events()) == [y, z]


def test_an_exception_inside_a_childs_event_generator_loses_only_its_events():
    def events():
        yield AllBlocksCleared()
        raise Boom

    connector = multi()
    connector.sub_connectors[0].answers["take_events"] = events
    connector.sub_connectors[1].answers["take_events"] = lambda: [AllBlocksCleared()]
    assert len(list(connector.take_events())) == 1


def test_events_and_worker_metadata_of_all_ranks_are_added_up_per_child():
    engine = Lockstep(ranks=2)
    (_, a0, a1), (_, _, b1) = engine.fakes(0), engine.fakes(1)
    for fake, *names in ((a0, "x", "y"), (a1, "y"), (b1, "z")):
        fake.answers["get_kv_connector_kv_cache_events"] = lambda names=names: FakeEvents(names)
        fake.answers["build_connector_worker_meta"] = FakeWorkerMetadata(set(names))
    engine.step()
    ((a,),), ((b,),) = (fake.called("update_connector_output") for fake in engine.scheduler.sub_connectors)
    assert (a.kv_cache_events.events, a.kv_cache_events.workers) == (["x", "y", "y"], 2)
    assert (b.kv_cache_events.events, b.kv_cache_events.workers) == (["z"], 1)
    assert (a.kv_connector_worker_meta, b.kv_connector_worker_meta) == (
        FakeWorkerMetadata({"x", "y"}),
        FakeWorkerMetadata({"z"}),
    )


@pytest.mark.parametrize("error", FAULTS)
def test_events_that_raise_in_every_method_of_their_container_harm_nobody(error):
    for method in ("add_events", "increment_workers", "get_all_events", "get_number_of_workers"):
        bad, good = breaking(FakeEvents(["x"]), method, error), FakeEvents(["x"])
        ours, theirs = (bad, good) if method in ("add_events", "increment_workers") else (good, bad)
        events = MultiKVEvents({0: ours, 1: FakeEvents(["y"])})
        events.add_events([(0, theirs), (1, FakeEvents(["y"]))])
        assert (events.children[1].events, events.children[1].workers) == (["y", "y"], 2)
    events = MultiKVEvents({0: breaking(FakeEvents(["x"]), "aggregate", error), 1: FakeEvents(["y"])})
    assert list(events.aggregate().children) == [1]
    events = MultiKVEvents({0: breaking(FakeEvents(["x"]), "clear_events", error), 1: FakeEvents(["y"])})
    events.clear_events()
    assert events.children[1].events == []


# ---- Handshake, preemption.


def test_each_child_gets_back_its_own_handshake_metadata_of_every_rank():
    sent = {}
    for rank in range(2):
        connector = worker(child("a"), child("b"), child("c"))
        for index in (0, 2):
            connector.sub_connectors[index].answers["get_handshake_metadata"] = FakeHandshake(f"{index}@{rank}")
        sent[0, rank] = connector.get_handshake_metadata()
    received = pickle.loads(pickle.dumps(sent))
    connector = multi(child("a"), child("b"), child("c"))
    connector.set_xfer_handshake_metadata_pp_aware(received)
    a, b, c = connector.sub_connectors
    assert a.called("set_xfer_handshake_metadata_pp_aware") == [
        [{(0, 0): FakeHandshake("0@0"), (0, 1): FakeHandshake("0@1")}]
    ]
    assert b.called("set_xfer_handshake_metadata_pp_aware") == [[{}]]
    assert c.called("set_xfer_handshake_metadata") == [[{0: FakeHandshake("2@0"), 1: FakeHandshake("2@1")}]]


def test_no_handshake_metadata_anywhere_is_none():
    assert worker().get_handshake_metadata() is None
    connector = multi()
    connector.set_xfer_handshake_metadata_pp_aware({})  # what vLLM then calls
    assert [fake.called("set_xfer_handshake_metadata") for fake in connector.sub_connectors] == [[[{}]]] * 2


def test_preemptions_reach_old_and_new_children_in_their_own_form():
    children = child("new"), child("old", "OldPreemptionChild")
    scheduler_side, worker_side = multi(*children), worker(*children)
    new, old = worker_side.sub_connectors
    worker_side.handle_preemptions(scheduler_side.build_connector_meta(scheduler_output()))
    worker_side.handle_preemptions(scheduler_side.build_connector_meta(scheduler_output({"r"})))
    assert new.called("handle_preemptions") == [[FakeMetadata("new")]] * 2
    assert old.called("handle_preemptions") == [[{"r"}]]


class Quiet(Lockstep):
    """The first child's scheduler has no work for its workers, until ``has_work``. ``is_idle``: they have none left."""

    def __init__(self, *children):
        super().__init__(*children)
        self.has_work, self.is_idle = False, True
        self.answer_quietly()

    def answer_quietly(self):
        answer = lambda output: FakeMetadata("work") if self.has_work else QuietStep()  # noqa: E731
        self.scheduler.sub_connectors[0].answers["build_connector_meta"] = answer

    def hooks_of_step(self, index=0):
        """Hooks that a step calls of the worker's instance of a child."""
        fake = self.workers[0].sub_connectors[index]
        before = len(fake.calls)
        self.reported[0, index] = QuietResults() if self.is_idle else KVConnectorTransferResults()
        self.step()
        return [name for name, *_ in fake.calls[before:]]


def test_a_child_with_nothing_to_do_is_asked_for_its_reports_until_it_has_none():
    engine = Quiet()
    engine.is_idle = False
    asked = engine.hooks_of_step()
    assert set(asked) == {
        *("get_transfer_results", "get_kv_connector_stats", "get_block_ids_with_load_errors"),
        *("get_kv_connector_kv_cache_events", "build_connector_worker_meta"),
    }
    engine.is_idle = True
    assert engine.hooks_of_step() == ["get_transfer_results"]
    assert engine.hooks_of_step() == []
    assert "start_load_kv" in engine.hooks_of_step(index=1)


def test_a_child_that_works_is_asked_again_though_it_has_nothing_to_report_yet():
    """With speculative decoding it stores after it was asked."""
    engine = Quiet()
    engine.hooks_of_step()
    engine.has_work = True
    assert {"bind_connector_metadata", "wait_for_save", "get_transfer_results"} <= set(engine.hooks_of_step())
    engine.has_work = False
    assert "get_transfer_results" in engine.hooks_of_step()
    assert "get_transfer_results" not in engine.hooks_of_step()


def test_a_step_in_which_no_child_has_work_is_a_constant():
    engine = Quiet(child("a"))
    assert isinstance(engine.plan(), QuietStep)
    engine.scheduler.on_new_request(request())
    assert engine.plan().arrived == {"r"}
    assert isinstance(engine.plan(), QuietStep)
    assert engine.step().kv_connector_worker_meta is None


def test_a_child_with_no_work_is_shown_reports_only_where_there_are_some():
    engine = Quiet()
    hook = "update_connector_output"

    def shown(**reports):
        before = [len(fake.called(hook)) for fake in engine.scheduler.sub_connectors]
        engine.plan()
        engine.scheduler.update_connector_output(KVConnectorOutput(**reports))
        return [len(fake.called(hook)) - n for fake, n in zip(engine.scheduler.sub_connectors, before, strict=True)]

    assert shown() == [0, 1]
    assert shown(failed_recving={"r"}) == [1, 1]
    engine.has_work = True
    assert shown() == [1, 1]


def test_a_quiet_child_that_fails_leaves_service_at_once_and_comes_back():
    engine = Quiet(child("a"))
    engine.hooks_of_step()
    assert isinstance(engine.plan(), QuietStep)
    engine.scheduler.sub_connectors[0].raising = {"build_connector_meta"}
    engine.step()
    engine.step()
    assert [connector._children[0].isolated for connector in (engine.scheduler, *engine.workers)] == [True, True]
    engine.scheduler.sub_connectors[0].raising = set()
    assert engine.recover()
    engine.answer_quietly()
    assert "get_transfer_results" in engine.hooks_of_step()
    assert "get_transfer_results" not in engine.hooks_of_step()


def test_vllm_calls_hooks_of_layers_while_a_child_that_has_some_works():
    engine = Quiet(child("a"))
    connector = engine.workers[0]
    connector.bind_connector_metadata(engine.plan())
    assert not connector.has_connector_metadata()
    engine.has_work = True
    connector.bind_connector_metadata(engine.plan())
    assert connector.has_connector_metadata()
    connector._children[0].empty_hooks = LAYER_HOOKS
    connector.bind_connector_metadata(engine.plan())
    assert not connector.has_connector_metadata()
