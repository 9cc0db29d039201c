# SPDX-License-Identifier: Apache-2.0
import pickle
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from tests.multi_connector.engine import Engine, allocated, answering, counters
from tests.multi_connector.fakes import (
    Boom,
    FakeEvents,
    FakeHandshake,
    FakeMetadata,
    FakeWorkerMetadata,
    blocks,
    child,
    multi,
    request,
    scheduler_output,
    worker,
)
from vllm_overlay.multi_connector.completion import UnreportableLoad
from vllm_overlay.multi_connector.metadata import MultiHandshakeMetadata, MultiWorkerMetadata

# ---- Lookup and selection.


def test_the_best_weighted_offer_is_chosen_and_all_are_asked_in_one_call():
    connector = answering(100, 90, 16, weights=[1.0, 2.0, 1.0])
    assert connector.get_num_new_matched_tokens(request(), 32) == (90, True)
    assert [len(fake.called("get_num_new_matched_tokens")) for fake in connector.sub_connectors] == [1, 1, 1]


def test_losers_get_the_real_blocks_and_no_tokens():
    connector = answering(100, 90)
    r, b = request(), blocks(1, 2)
    connector.get_num_new_matched_tokens(r, 0)
    connector.update_state_after_alloc(r, b, 100)
    assert [fake.called("update_state_after_alloc") for fake in connector.sub_connectors] == [
        [[r, b, 100]],
        [[r, b, 0]],
    ]


def test_what_the_scheduler_does_not_take_is_loaded_by_nobody():
    connector = answering(100)
    connector.get_num_new_matched_tokens(request(), 0)
    connector.update_state_after_alloc(request(), blocks(1), 0)
    assert allocated(connector.sub_connectors[0]) == [0]
    assert connector.build_connector_meta(scheduler_output()).loads == {}


def test_the_synchronous_flag_is_the_chosen_ones():
    assert answering((16, True), (64, False)).get_num_new_matched_tokens(request(), 0) == (64, False)


def test_a_hit_of_nothing_is_never_asynchronous():
    assert answering((0, True)).get_num_new_matched_tokens(request(), 0) == (0, False)


def test_the_chosen_child_says_what_it_loads_and_from_where():
    connector = answering(16, 64)
    sources = {CacheHitSource.DISK: 64}
    connector.sub_connectors[1].answers |= {
        "get_loaded_kv_cache_group_ids": (1, 2),
        "get_external_cache_hit_sources": sources,
    }
    connector.get_num_new_matched_tokens(request(), 0)
    assert connector.get_loaded_kv_cache_group_ids(request()) == (1, 2)
    assert connector.get_external_cache_hit_sources(request(), 64) == sources


def test_without_a_choice_the_interfaces_defaults_hold():
    connector = answering(0)
    assert connector.get_loaded_kv_cache_group_ids(request()) == (7,)
    assert connector.get_external_cache_hit_sources(request(), 8) == {CacheHitSource.EXTERNAL_UNSPECIFIED: 8}
    assert connector.get_external_cache_hit_sources(request(), 0) == {}


def test_a_child_still_looking_does_not_hide_an_offer_it_cannot_beat():
    connector = answering(900, None, weights=[1.0, 0.5])
    assert connector.get_num_new_matched_tokens(request(), 0) == (900, True)


def test_a_child_still_looking_that_could_win_is_waited_for_until_the_deadline():
    connector = answering(16, None, lookup_timeout_ms=50)
    for passed_s in (0.0, 0.04):
        connector._scheduler._clock.now = 100.0 + passed_s
        assert connector.get_num_new_matched_tokens(request(), 0) == (None, False)
    connector._scheduler._clock.now = 100.051
    assert connector.get_num_new_matched_tokens(request(), 0) == (16, True)


def test_the_deadline_is_each_requests_own():
    connector = answering(16, None, lookup_timeout_ms=50)
    connector.get_num_new_matched_tokens(request("first"), 0)
    connector._scheduler._clock.now += 1
    assert connector.get_num_new_matched_tokens(request("second"), 0) == (None, False)


def test_a_request_that_found_no_blocks_does_not_wait_again():
    connector = answering(16, None)
    connector.get_num_new_matched_tokens(request(), 0)
    connector._scheduler._clock.now += 1
    assert [connector.get_num_new_matched_tokens(request(), 0)[0] for _ in range(2)] == [16, 16]


def test_a_request_that_was_admitted_may_wait_again():
    connector = answering(16, None)
    connector.get_num_new_matched_tokens(request(), 0)
    connector._scheduler._clock.now += 1
    connector.get_num_new_matched_tokens(request(), 0)
    connector.update_state_after_alloc(request(), blocks(1), 16)
    assert connector.get_num_new_matched_tokens(request(), 0) == (None, False)  # after a preemption, say


def test_an_answer_after_waiting_counts():
    connector = answering(16, None)
    connector.get_num_new_matched_tokens(request(), 0)
    connector.sub_connectors[1].answers["get_num_new_matched_tokens"] = (64, False)
    assert connector.get_num_new_matched_tokens(request(), 0) == (64, False)


@pytest.mark.parametrize("answer", [-1, 1001, 16.0, "16", True, [1]])
def test_an_impossible_answer_is_taken_as_nothing_and_counted(answer):
    connector = answering(answer, 16)
    assert connector.get_num_new_matched_tokens(request(num_tokens=1000), 0) == (16, True)
    assert counters(connector).invalid_answers == 1


@pytest.mark.parametrize("answer", [None, 5, (1, 2, 3)])
def test_an_answer_that_is_no_pair_is_taken_as_nothing(answer):
    connector = answering(0, 16)
    connector.sub_connectors[0].answers["get_num_new_matched_tokens"] = lambda *args: answer
    assert connector.get_num_new_matched_tokens(request(), 0) == (16, True)
    assert counters(connector).errors == {"get_num_new_matched_tokens": 1}


@pytest.mark.parametrize("recurrent, taken", [(False, 900), (True, 0)])
def test_the_whole_prompt_is_a_hit_only_where_no_state_must_rewind(recurrent, taken):
    connector = answering(900, recurrent=recurrent)
    assert connector.get_num_new_matched_tokens(request(num_tokens=1000), 100)[0] == taken


def test_all_but_the_last_token_may_always_hit():
    assert answering(899, recurrent=True).get_num_new_matched_tokens(request(num_tokens=1000), 100)[0] == 899


def test_a_child_that_failed_a_request_too_often_is_not_chosen_for_it_again():
    connector = answering(100, 16, max_load_attempts=2)
    r = request()
    for expected in (100, 100, 16):
        assert connector.get_num_new_matched_tokens(r, 0)[0] == expected
        connector.update_state_after_alloc(r, blocks(1), expected)
        connector.update_connector_output(KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"}))
    assert connector.get_num_new_matched_tokens(request("another"), 0)[0] == 100


def test_a_decision_is_made_anew_at_every_lookup():
    connector = answering(100, 16)
    connector.get_num_new_matched_tokens(request(), 0)
    connector.sub_connectors[0].answers["get_num_new_matched_tokens"] = (0, False)
    assert connector.get_num_new_matched_tokens(request(), 0) == (16, True)
    connector.update_state_after_alloc(request(), blocks(1), 16)
    assert [allocated(fake) for fake in connector.sub_connectors] == [[0], [16]]


# ---- Junctions.


def junction_setter(tokens, junction):
    def answer(r, num_computed_tokens):
        r.seen.append(r.shared_prefix_boundary)
        if junction is not None:
            r.shared_prefix_boundary = junction
        return tokens, True

    return answer


def junction_after(*answers, schedulers=64, **settings):
    connector = answering(*[0] * len(answers), **settings)
    for fake, (tokens, junction) in zip(connector.sub_connectors, answers, strict=True):
        fake.answers["get_num_new_matched_tokens"] = junction_setter(tokens, junction)
    r = request(junction=schedulers)
    r.seen = []
    connector.get_num_new_matched_tokens(r, 0)
    assert r.seen == [schedulers] * len(answers)
    return r.shared_prefix_boundary


def test_every_child_starts_from_the_schedulers_junction_and_the_furthest_useful_one_wins():
    assert junction_after((128, 512), (100, 256)) == 512


def test_a_junction_behind_the_chosen_hit_gives_way_to_the_schedulers():
    assert junction_after((128, 100), (0, 128)) == 64


def test_while_waiting_the_junction_stays_the_schedulers():
    assert junction_after((128, 512), (None, 600)) == 64


def test_an_untouched_junction_stays():
    assert junction_after((0, None), (0, None), schedulers=300) == 300


def test_a_raising_childs_junction_does_not_count():
    connector = answering(0, 0)

    def answer(r, num_computed_tokens):
        r.shared_prefix_boundary = 512
        raise Boom

    connector.sub_connectors[1].answers["get_num_new_matched_tokens"] = answer
    r = request(junction=64)
    connector.get_num_new_matched_tokens(r, 0)
    assert r.shared_prefix_boundary == 64


# ---- One step from scheduler to workers and back.


def test_each_child_gets_its_own_metadata():
    engine = Engine()
    engine.step()
    assert [fake.called("bind_connector_metadata") for fake in engine.workers[0].sub_connectors] == [
        [[FakeMetadata("a")]],
        [[FakeMetadata("b")]],
    ]


def test_a_load_is_done_when_its_child_says_so():
    engine = Engine()
    engine.admit("r", 1)
    assert engine.step().finished_recving is None
    engine.report(1, recving={"r"})
    told = engine.step()
    assert (told.finished_recving, told.failed_recving) == ({"r"}, set())
    assert counters(engine.scheduler, "b").loaded_tokens == 64
    engine.finish("r")
    assert engine.tables_are_empty()


def test_another_childs_or_a_repeated_report_of_a_load_is_ignored_and_counted():
    engine = Engine()
    engine.admit("r", 1)
    engine.report(0, recving={"r"})
    assert engine.step().finished_recving is None
    engine.report(1, recving={"r"})
    engine.step()
    engine.report(1, recving={"r"}, sending={"never"})
    told = engine.step()
    assert (told.finished_recving, told.finished_sending) == (None, None)
    stats = engine.workers[0].get_kv_connector_stats()
    assert stats is None  # already told: Engine.step takes the stats of every step


def test_ignored_reports_are_counted_by_child():
    connector = worker()
    connector.sub_connectors[1].answers["get_transfer_results"] = KVConnectorTransferResults({"x"}, {"y"}, {"y"})
    connector.get_transfer_results(set())
    assert (counters(connector, "a").ignored_reports, counters(connector, "b").ignored_reports) == (0, 2)


def test_a_failed_load_is_told_and_counted():
    engine = Engine()
    engine.admit("r", 1)
    engine.report(1, recving={"r"}, failed={"r"})
    told = engine.step()
    assert (told.finished_recving, told.failed_recving) == ({"r"}, {"r"})
    assert counters(engine.scheduler, "b").failed_loads == 1
    assert counters(engine.scheduler, "b").loaded_tokens == 0


def test_with_two_ranks_a_load_is_done_when_both_ranks_childs_say_so():
    engine = Engine(ranks=2)
    engine.admit("r", 0)
    engine.report(0, rank=0, recving={"r"}, failed={"r"})
    assert engine.step().finished_recving is None
    engine.report(0, rank=1, recving={"r"})
    told = engine.step()
    assert (told.finished_recving, told.failed_recving) == ({"r"}, {"r"})


def test_blocks_are_free_when_every_child_that_holds_them_has_reported():
    engine = Engine()
    assert engine.finish("r", 0, 1)
    engine.report(1, sending={"r"})
    assert engine.step().finished_sending is None
    engine.report(1, sending={"r"})
    assert engine.step().finished_sending is None  # told twice, still one child
    engine.report(0, sending={"r"})
    assert engine.step().finished_sending == {"r"}
    assert engine.tables_are_empty()


def test_with_two_ranks_blocks_are_free_when_every_child_on_both_has_reported():
    engine = Engine(ranks=2)
    engine.finish("r", 0, 1)
    for rank, index in ((0, 0), (0, 1), (1, 0)):
        engine.report(index, rank=rank, sending={"r"})
        assert engine.step().finished_sending is None
    engine.report(1, rank=1, sending={"r"})
    assert engine.step().finished_sending == {"r"}


def test_a_request_no_child_holds_is_free_at_once():
    engine = Engine()
    assert engine.finish("r") is False
    assert engine.step().finished_sending is None
    assert engine.tables_are_empty()


def test_a_child_that_took_the_partial_tail_and_the_request_owes_one_report():
    engine = Engine()
    engine.scheduler.sub_connectors[0].answers["register_finished_partial_tail"] = True
    assert engine.scheduler.register_finished_partial_tail(request("r"), ([1],), [(0, 1, 12)])
    assert engine.finish("r", 1)
    engine.report(1, sending={"r"})
    assert engine.step().finished_sending is None
    engine.report(0, sending={"r"})
    assert engine.step().finished_sending == {"r"}


@pytest.mark.parametrize("load_first", [True, False])
def test_an_aborted_request_is_freed_once_after_its_load_and_its_saves(load_first):
    engine = Engine()
    engine.admit("r", 0)
    engine.step()
    engine.finish("r", 1)
    reports = [{"child_index": 0, "recving": {"r"}}, {"child_index": 1, "sending": {"r"}}]
    told = []
    for report in reports if load_first else reversed(reports):
        engine.report(**report)
        output = engine.step()
        told.append((output.finished_recving or set()) | (output.finished_sending or set()))
    assert told == [set(), {"r"}]
    assert engine.tables_are_empty()


def test_an_aborted_lookup_leaves_nothing():
    connector = answering(16, None)
    connector.get_num_new_matched_tokens(request(), 0)
    connector._scheduler._clock.now += 1
    connector.get_num_new_matched_tokens(request(), 0)
    connector.request_finished_all_groups(request(), ([],))
    assert not connector._scheduler.tracked


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


def test_each_child_sees_its_own_worker_metadata_loads_and_saves():
    engine = Engine()
    engine.admit("load", 0)
    engine.finish("save", 1)
    engine.workers[0].sub_connectors[1].answers["build_connector_worker_meta"] = FakeWorkerMetadata({"x"})
    engine.report(0, recving={"load"}, failed={"load"})
    engine.report(1, sending={"save"})
    engine.step()
    ((a,),), ((b,),) = (fake.called("update_connector_output") for fake in engine.scheduler.sub_connectors)
    assert (a.finished_recving, a.failed_recving, a.finished_sending) == ({"load"}, {"load"}, None)
    assert (b.finished_recving, b.failed_recving, b.finished_sending) == (None, set(), {"save"})
    assert (a.kv_connector_worker_meta, b.kv_connector_worker_meta) == (None, FakeWorkerMetadata({"x"}))


def test_worker_metadata_of_ranks_is_added_up_per_child():
    merged = MultiWorkerMetadata((FakeWorkerMetadata({"x"}), None)).aggregate(
        MultiWorkerMetadata((FakeWorkerMetadata({"y"}), FakeWorkerMetadata({"z"})), broken=frozenset({1}))
    )
    assert merged.children == (FakeWorkerMetadata({"x", "y"}), FakeWorkerMetadata({"z"}))
    assert merged.broken == {1}


def test_worker_metadata_that_cannot_be_added_up_isolates_its_child():
    boom = MultiWorkerMetadata((FakeWorkerMetadata({"boom"}), FakeWorkerMetadata({"x"})))
    merged = boom.aggregate(boom)
    assert (merged.children, merged.broken) == ((None, FakeWorkerMetadata({"x"})), {0})


def test_nothing_to_say_is_no_worker_metadata():
    assert worker().build_connector_worker_meta() is None


def test_events_of_the_scheduler_side_are_chained():
    connector = multi()
    x, y, z = (BlockRemoved(block_hashes=[i], medium=None) for i in range(3))
    connector.sub_connectors[0].answers["take_events"] = lambda: iter([x])
    connector.sub_connectors[1].answers["take_events"] = lambda: [y, z]
    assert list(connector.take_events()) == [x, y, z]


def test_an_exception_inside_a_childs_event_generator_loses_only_its_events():
    def events():
        yield AllBlocksCleared()
        raise Boom

    connector = multi()
    connector.sub_connectors[0].answers["take_events"] = events
    connector.sub_connectors[1].answers["take_events"] = lambda: [AllBlocksCleared()]
    assert len(list(connector.take_events())) == 1


def test_what_are_no_events_is_not_published():
    connector = multi()
    connector.sub_connectors[0].answers["take_events"] = lambda: ["x"]
    assert list(connector.take_events()) == []


def test_events_of_all_ranks_are_added_up_per_child():
    engine = Engine(ranks=2)
    (_, a0, a1), (_, _, b1) = engine.fakes(0), engine.fakes(1)
    a0.answers["get_kv_connector_kv_cache_events"] = lambda: FakeEvents(["x", "y"])
    a1.answers["get_kv_connector_kv_cache_events"] = lambda: FakeEvents(["y"])
    b1.answers["get_kv_connector_kv_cache_events"] = lambda: FakeEvents(["z"])
    engine.step()
    ((a,),), ((b,),) = (fake.called("update_connector_output") for fake in engine.scheduler.sub_connectors)
    assert (a.kv_cache_events.events, a.kv_cache_events.workers) == (["x", "y", "y"], 2)
    assert (b.kv_cache_events.events, b.kv_cache_events.workers) == (["z"], 1)


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


def test_handshake_metadata_keyed_by_rank_is_split_too():
    connector = multi()
    connector.set_xfer_handshake_metadata({3: MultiHandshakeMetadata((None, FakeHandshake("b")))})
    a, b = connector.sub_connectors
    assert a.called("set_xfer_handshake_metadata") == [[{}]]
    assert b.called("set_xfer_handshake_metadata") == [[{3: FakeHandshake("b")}]]


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


# ---- No shared fate.


@pytest.mark.parametrize("hook", ["update_state_after_alloc", "build_connector_meta"])
def test_a_load_whose_child_fails_before_it_is_sent_is_told_failed(hook):
    engine = Engine()
    engine.scheduler.sub_connectors[0].raising = {hook}
    engine.admit("r", 0)
    told = engine.step()
    assert (told.finished_recving, told.failed_recving) == ({"r"}, {"r"})
    # The workers' child never saw it and was shut down before the report.
    (fake, _) = engine.workers[0].sub_connectors
    assert not fake.called("bind_connector_metadata") and not fake.called("start_load_kv")
    assert len(fake.called("shutdown")) == 1
    assert engine.scheduler.get_num_new_matched_tokens(request("next"), 0) == (0, False)
    engine.finish("next")
    engine.finish("r")
    assert engine.tables_are_empty()


WORKER_HOOKS = [
    "bind_connector_metadata",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("hook", WORKER_HOOKS)
def test_a_workers_child_that_raises_is_shut_down_before_its_loads_and_saves_are_released(hook, ranks):
    engine = Engine(ranks=ranks)
    engine.admit("r", 0)
    engine.finish("s", 0, 1)
    bad = engine.workers[-1].sub_connectors[0]
    bad.raising = {hook}
    for rank in range(ranks):
        engine.report(1, rank=rank, sending={"s"})
    told = engine.step()
    if ranks == 2:
        assert told.finished_recving is None  # the other rank's child has not ended its part yet
        told = engine.step()  # now the scheduler knows, and so does the other rank
    assert (told.finished_recving, told.failed_recving) == ({"r"}, {"r"})
    assert told.finished_sending == {"s"}
    for connector in engine.workers:
        fake, other = connector.sub_connectors
        assert len(fake.called("shutdown")) == 1 and not other.called("shutdown")
    assert bad.calls[-1][0] == "shutdown" or ranks == 1
    assert engine.scheduler._children[0].isolated
    engine.finish("r")
    engine.step()
    assert engine.tables_are_empty()


def test_loads_sent_while_the_scheduler_does_not_know_yet_are_refused():
    engine = Engine()
    engine.workers[0].sub_connectors[0].raising = {"wait_for_save"}
    engine.admit("first", 0)
    metadata = engine.scheduler.build_connector_meta(scheduler_output())
    engine.workers[0].bind_connector_metadata(metadata)
    engine.workers[0].wait_for_save()
    assert engine.workers[0].get_transfer_results(set()).failed_recving == {"first"}
    engine.admit("second", 0)
    told = engine.step()
    assert told.failed_recving == {"second"}


def test_what_a_child_that_cannot_be_shut_down_holds_stays_held():
    engine = Engine()
    engine.admit("r", 0)
    engine.finish("s", 0)
    engine.workers[0].sub_connectors[0].raising = {"start_load_kv", "shutdown"}
    for _ in range(3):
        told = engine.step()
        assert (told.finished_recving, told.finished_sending) == (None, None)
    assert len(engine.workers[0].sub_connectors[0].called("shutdown")) == 1


def test_a_load_that_a_child_out_of_service_never_saw_is_told_failed_even_if_it_cannot_be_shut_down():
    engine = Engine()
    engine.workers[0].sub_connectors[0].raising = {"start_load_kv", "shutdown"}
    metadata = engine.scheduler.build_connector_meta(scheduler_output())
    engine.workers[0].bind_connector_metadata(metadata)
    engine.workers[0].start_load_kv(None)
    engine.admit("r", 0)
    assert engine.step().failed_recving == {"r"}


def test_loads_reported_good_while_their_errors_could_not_be_asked_for_are_told_failed():
    engine = Engine()
    engine.admit("r", 0)
    engine.workers[0].sub_connectors[0].raising = {"get_block_ids_with_load_errors"}
    engine.report(0, recving={"r"})
    assert engine.step().failed_recving == {"r"}


def test_a_child_the_scheduler_took_out_of_service_gets_no_hook_of_that_step():
    engine = Engine()
    engine.scheduler.sub_connectors[0].raising = {"build_connector_meta"}
    engine.step()
    (fake, other) = engine.workers[0].sub_connectors
    assert [name for name, *_ in fake.calls if name != "get_kv_connector_stats"] == ["shutdown"]
    assert len(other.called("handle_preemptions")) == 1


def test_a_worker_tells_of_an_isolation_until_the_scheduler_has_heard():
    engine = Engine()
    engine.workers[0].sub_connectors[0].raising = {"start_load_kv"}
    assert engine.step().kv_connector_worker_meta.broken == {0}
    told = engine.step().kv_connector_worker_meta
    assert (told.broken, told.unstopped) == (frozenset(), frozenset())
    assert counters(engine.scheduler).isolations == 1


def test_a_load_that_fails_after_its_request_is_gone_leaves_nothing():
    engine = Engine()
    engine.admit("r", 0)
    engine.step()
    engine.finish("r")
    engine.report(0, recving={"r"}, failed={"r"})
    engine.step()
    assert engine.tables_are_empty()


def test_a_save_promised_by_a_child_that_raises_in_finishing_is_held_until_the_workers_stop_it():
    engine = Engine()
    engine.scheduler.sub_connectors[0].raising = {"request_finished_all_groups"}
    assert engine.finish("r")
    assert engine.step().finished_sending == {"r"}
    assert not engine.finish("later")
    assert engine.tables_are_empty()


def test_the_other_child_goes_on_after_an_isolation():
    engine = Engine()
    engine.scheduler.sub_connectors[0].raising = {"build_connector_meta"}
    engine.step()
    engine.admit("r", 1)
    engine.report(1, recving={"r"})
    told = engine.step()
    assert (told.finished_recving, told.failed_recving) == ({"r"}, set())


def test_a_failed_synchronous_load_invalidates_its_blocks():
    engine = Engine()
    engine.admit("r", 0, asynchronous=False)
    engine.workers[0].sub_connectors[0].raising = {"wait_for_layer_load"}
    told = engine.step()
    assert (told.invalid_block_ids, told.finished_recving, told.failed_recving) == ({4, 5}, None, set())


def test_a_good_synchronous_load_needs_no_report():
    engine = Engine()
    engine.admit("r", 0, asynchronous=False)
    told = engine.step()
    assert (told.invalid_block_ids, told.finished_recving) == (set(), None)
    assert counters(engine.scheduler).loaded_tokens == 64


def test_a_failed_synchronous_load_on_several_groups_is_not_served_on():
    engine = Engine(groups=2)
    engine.admit("r", 0, asynchronous=False)
    engine.workers[0].sub_connectors[0].raising = {"start_load_kv"}
    with pytest.raises(UnreportableLoad):
        engine.step()


def test_block_errors_are_a_union():
    connector = worker()
    for fake, ids in zip(connector.sub_connectors, ({1}, {2}), strict=True):
        fake.answers["get_block_ids_with_load_errors"] = ids
    connector.get_transfer_results(set())
    assert connector.get_block_ids_with_load_errors() == {1, 2}


def test_block_errors_on_several_groups_are_passed_on_whether_a_load_is_open_or_not():
    engine = Engine(groups=2)
    engine.admit("s", 1)
    engine.workers[0].sub_connectors[0].answers["get_block_ids_with_load_errors"] = {9}
    engine.report(1, recving={"s"})
    told = engine.step()
    assert (told.invalid_block_ids, told.finished_recving, told.failed_recving) == ({9}, {"s"}, set())


def test_an_exception_is_logged_once_with_child_hook_and_traceback(monkeypatch):
    from vllm_overlay.multi_connector import child as child_module

    lines = []
    monkeypatch.setattr(child_module.logger, "error", lambda *args, exc_info=None: lines.append((args, exc_info)))
    connector = multi()
    connector.sub_connectors[0].raising = {"take_events"}
    for _ in range(3):
        connector._children[0].isolated = False
        connector.take_events()
    ((message, *args), error) = lines[0]
    assert len(lines) == 1
    assert (message % tuple(args)).startswith("Connector 'a' failed in take_events")
    assert isinstance(error, Boom)
    assert counters(connector).errors == {"take_events": 3}


def test_shutdown_reaches_every_child_and_never_raises():
    connector = worker()
    a, b = connector.sub_connectors
    a.raising = {"shutdown"}
    connector.shutdown()
    connector.shutdown()
    assert (len(a.called("shutdown")), len(b.called("shutdown"))) == (2, 1)  # it is tried again while it raises


def test_binding_the_cache_manager_reaches_each_child_once():
    connector = multi()
    manager = SimpleNamespace(block_pool="pool")
    connector.bind_kv_cache_manager(manager)
    for fake in connector.sub_connectors:
        assert fake.called("bind_kv_cache_manager") == [[manager]]
        assert fake.called("bind_gpu_block_pool") == [["pool"]]


# ---- Counting.


def test_a_lookup_is_counted_once_at_admission_however_often_it_is_made():
    connector = answering(100, 90, 0)
    for _ in range(5):
        connector.get_num_new_matched_tokens(request(num_tokens=1000), 200)
    connector.update_state_after_alloc(request(), blocks(1), 100)
    connector.update_state_after_alloc(request(), blocks(1), 0)  # vLLM calls again when the load is done
    a, b, c = (counters(connector, name) for name in "abc")
    assert [(x.queries, x.asked_tokens, x.offered_tokens, x.chosen, x.outbid) for x in (a, b, c)] == [
        (1, 800, 100, 1, 0),
        (1, 800, 90, 0, 1),
        (1, 800, 0, 0, 0),
    ]


def test_a_hit_the_scheduler_does_not_use_was_not_chosen():
    connector = answering(100)
    connector.get_num_new_matched_tokens(request(), 0)
    connector.update_state_after_alloc(request(), blocks(1), 0)
    assert (counters(connector).offered_tokens, counters(connector).chosen) == (100, 0)


def test_the_wait_is_counted_for_the_child_that_was_still_looking():
    connector = answering(16, None)
    connector.get_num_new_matched_tokens(request(), 0)
    connector._scheduler._clock.now += 0.25
    connector.get_num_new_matched_tokens(request(), 0)
    connector.update_state_after_alloc(request(), blocks(1), 16)
    assert (counters(connector, "a").lookup_wait_seconds, counters(connector, "b").lookup_wait_seconds) == (0, 0.25)


def test_load_seconds_run_from_allocation_to_completion():
    connector = answering(16)
    connector.get_num_new_matched_tokens(request(), 0)
    connector.update_state_after_alloc(request(), blocks(1), 16)
    connector._scheduler._clock.now += 0.5
    connector.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    assert (counters(connector).load_seconds, counters(connector).loaded_tokens) == (0.5, 16)
