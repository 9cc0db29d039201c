# SPDX-License-Identifier: Apache-2.0
"""vLLM's own connectors as children: what they expect of a MultiConnector, with their own methods (vllms_own.py)."""

import dataclasses

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.multi_connector.fakes import Boom, FakeMetadata, blocks, child, multi, request, scheduler_output
from tests.multi_connector.lockstep import Lockstep, by_label, tally_of
from tests.multi_connector.vllms_own import MODULE, to_be_decoded_elsewhere


def own(name, cls):
    """One of vLLM's own connectors as a child."""
    return {**child(name, cls), "kv_connector_module_path": MODULE}


MORIIO, NIXL, HISPARSE = own("moriio", "MoRIIOProducer"), own("nixl", "NixlProducer"), own("hisparse", "HiSparse")


def started(engine, request_id="r"):
    """A request that waits for nothing and has been scheduled; returns it."""
    r = to_be_decoded_elsewhere(request_id)
    engine.scheduler.on_new_request(r)
    assert engine.scheduler.get_num_new_matched_tokens(r, 0)[0] == 0
    engine.scheduler.update_state_after_alloc(r, blocks(4, 5), 0)
    return r


def finish(engine, r):
    return engine.scheduler.request_finished_all_groups(r, ([4, 5],))[0]


def expired(connector):
    """Every block that MoRIIO's scheduler holds has been held for too long."""
    deadlines = connector.connector_scheduler._deferred_send_deadlines
    for request_id, (_, transfer_id) in deadlines.items():
        deadlines[request_id] = (0.0, transfer_id)


def is_over(engine):
    living = sum(connector._worker.living_requests for connector in engine.workers)
    return engine.tables_are_empty() and not living


# ---- Acknowledgements (MoRIIO, NIXL).


def test_moriio_frees_blocks_when_they_are_acknowledged():
    engine = Lockstep(MORIIO, child("b"))
    r = started(engine)
    engine.step()
    assert finish(engine, r)
    engine.workers[0].sub_connectors[0].acknowledge("transfer of r")
    assert engine.step().finished_sending == {"r"}
    engine.step()
    assert is_over(engine)


@pytest.mark.parametrize("ranks", [1, 2])
def test_moriios_acknowledgement_before_the_request_is_finished_is_not_lost(ranks):
    engine = Lockstep(MORIIO, child("b"), ranks=ranks)
    r = started(engine)
    engine.step()
    for connector in engine.workers:
        connector.sub_connectors[0].acknowledge("transfer of r")
        assert engine.step().finished_sending is None
    assert finish(engine, r)
    assert engine.step().finished_sending == {"r"}
    engine.step()
    assert is_over(engine)


def test_moriios_early_acknowledgement_does_not_free_what_a_sibling_still_reads():
    engine = Lockstep(MORIIO, child("b"))
    r = started(engine)
    engine.step()
    engine.workers[0].sub_connectors[0].acknowledge("transfer of r")
    engine.step()
    engine.scheduler.sub_connectors[1].answers["request_finished_all_groups"] = (True, None)
    assert finish(engine, r)
    assert engine.step().finished_sending is None
    engine.report(1, sending={"r"})
    assert engine.step().finished_sending == {"r"}
    engine.step()
    assert is_over(engine)


def test_an_early_acknowledgement_of_a_request_that_ends_unheld_leaves_nothing():
    engine = Lockstep(MORIIO, child("b"))
    r = started(engine)
    engine.step()
    engine.workers[0].sub_connectors[0].acknowledge("transfer of r")
    engine.step()
    r.kv_transfer_params = None
    assert not finish(engine, r)
    assert engine.step().finished_sending is None
    assert is_over(engine)


def test_blocks_that_moriio_gives_up_are_freed_and_its_workers_owe_nothing():
    engine = Lockstep(MORIIO, child("b"))
    r = started(engine)
    engine.step()
    finish(engine, r)
    engine.step()
    expired(engine.scheduler.sub_connectors[0])
    assert engine.step().finished_sending == {"r"}
    assert engine.step().finished_sending is None
    engine.workers[0].sub_connectors[0].acknowledge("transfer of r")
    assert engine.step().finished_sending is None
    engine.step()
    assert is_over(engine)


def test_blocks_that_moriio_gives_up_stay_held_for_its_sibling():
    engine = Lockstep(MORIIO, child("b"))
    r = started(engine)
    engine.step()
    engine.scheduler.sub_connectors[1].answers["request_finished_all_groups"] = (True, None)
    finish(engine, r)
    engine.step()
    expired(engine.scheduler.sub_connectors[0])
    assert engine.step().finished_sending is None
    engine.report(1, sending={"r"})
    assert engine.step().finished_sending == {"r"}
    engine.step()
    assert is_over(engine)


def test_moriio_does_not_swallow_the_reports_of_a_sibling():
    engine = Lockstep(MORIIO, child("b"))
    engine.scheduler.on_new_request(request("r"))
    engine.scheduler.sub_connectors[1].answers["request_finished_all_groups"] = (True, None)
    plain = to_be_decoded_elsewhere("r")
    plain.kv_transfer_params = None
    assert finish(engine, plain)
    engine.report(1, sending={"r"})
    assert engine.step().finished_sending == {"r"}
    assert engine.scheduler.sub_connectors[0].connector_scheduler._pending_sent_acks == {}


def test_a_save_that_is_given_up_in_the_step_it_began_is_owed_by_no_worker():
    engine = Lockstep()
    output = engine.run(engine.plan())
    engine.finish("r", 0)
    fake = engine.scheduler.sub_connectors[0]
    fake.answers["update_connector_output"] = lambda reports: setattr(reports, "finished_sending", {"r"})
    engine.scheduler.update_connector_output(output)
    assert output.finished_sending == {"r"}
    fake.answers["update_connector_output"] = None
    engine.step()
    assert engine.workers[0]._worker.open_requests == 0


def test_a_notice_that_overtakes_nixls_own_metadata_is_not_lost():
    """With asynchronous scheduling a rank hears from the decoding side before it hears that the request is finished."""
    engine = Lockstep(NIXL, child("b"))
    scheduler_side, worker_side = (fake for fake in engine.fakes(0))
    r = started(engine)
    worker_side.connector_worker._reqs_to_process.add("r")
    engine.step()
    overtaken = engine.plan()
    scheduler_side.connector_scheduler.request_finished.return_value = (True, None)
    assert finish(engine, r)
    worker_side.connector_worker.nixl_wrapper.get_new_notifs = lambda: {"peer": [b"r:1"]}
    output = engine.run(overtaken)
    assert output.finished_sending is None
    engine.scheduler.update_connector_output(output)
    worker_side.connector_worker.nixl_wrapper.get_new_notifs = dict
    assert engine.step().finished_sending == {"r"}
    engine.step()
    assert is_over(engine)
    assert tally_of(engine.workers[0]).total("ignored_reports") == 0


# ---- What a child changes in the reports.


def changing(engine, index, **fields):
    """The child sets these fields of the next reports that it is given."""
    fake = engine.scheduler.sub_connectors[index]
    fake.answers["update_connector_output"] = lambda output: (
        [setattr(output, *item) for item in fields.items()] and None
    )


def test_what_a_child_takes_out_stays_owed_until_it_puts_it_in():
    engine = Lockstep()
    engine.finish("r", 0)
    changing(engine, 0, finished_sending=None)
    engine.report(0, sending={"r"})
    assert engine.step().finished_sending is None
    assert engine.step().finished_sending is None
    changing(engine, 0, finished_sending={"r"})
    assert engine.step().finished_sending == {"r"}


def test_what_a_child_had_taken_out_is_freed_when_it_fails():
    engine = Lockstep()
    engine.finish("r", 0)
    changing(engine, 0, finished_sending=None)
    engine.report(0, sending={"r"})
    engine.step()
    engine.scheduler.sub_connectors[0].raising = {"build_connector_meta"}
    assert engine.step().finished_sending == {"r"}


def test_a_child_changes_only_what_is_its_own():
    engine = Lockstep()
    engine.finish("r", 1)
    engine.admit("load", 1)
    engine.step()
    changing(engine, 0, finished_sending={"r"}, finished_recving={"load"})
    output = engine.step()
    assert (output.finished_sending, output.finished_recving) == (None, None)
    changing(engine, 0, finished_sending=None, finished_recving=None)
    engine.report(1, sending={"r"}, recving={"load"})
    output = engine.step()
    assert (output.finished_sending, output.finished_recving) == ({"r"}, {"load"})


def test_a_change_in_place_is_not_a_siblings():
    engine = Lockstep()
    engine.admit("load", 0)
    engine.step()
    engine.scheduler.sub_connectors[0].answers["update_connector_output"] = lambda output: (
        output.finished_recving and output.finished_recving.clear()
    )
    engine.report(0, recving={"load"})
    assert engine.step().finished_recving is None
    ((seen,),) = engine.scheduler.sub_connectors[1].called("update_connector_output")[-1:]
    assert seen.finished_recving == {"load"}


@pytest.mark.parametrize("garbage", [7, "r", [object()]])
def test_reports_that_a_child_leaves_unreadable_isolate_it_alone(garbage):
    engine = Lockstep()
    engine.finish("r", 1)
    changing(engine, 0, finished_sending=garbage)
    engine.report(1, sending={"r"})
    output = engine.step()
    assert output.finished_sending == {"r"}
    assert engine.scheduler._children[0].isolated == (garbage != "r")


def test_with_a_report_from_one_rank_alone_the_others_owe_nothing_once_it_has_come():
    engine = one_report_a_request()
    engine.finish("r", 0)
    engine.report(0, rank=0, sending={"r"})
    assert engine.step().finished_sending == {"r"}
    assert engine.workers[1]._worker.open_requests == 1
    assert engine.step().finished_sending is None
    assert engine.tables_are_empty()


def one_report_a_request():
    """Two ranks of which one reports, as with ExampleHiddenStatesConnector."""
    engine = Lockstep(child("a"), ranks=2)
    engine.scheduler.sub_connectors[0].answers["get_finished_count"] = 1
    engine.aggregator = type(engine.aggregator).from_connector(engine.scheduler, 2)
    return engine


# ---- Receives (HiSparse, and everyone).


@pytest.mark.parametrize("failed", [False, True])
def test_hisparse_sees_what_its_sibling_has_received(failed):
    engine = Lockstep(child("b"), HISPARSE)
    engine.admit("r", 0)
    engine.step()
    engine.report(0, recving={"r"}, failed={"r"} if failed else ())
    engine.step()
    assert engine.scheduler.sub_connectors[1].coordinator.imports == [("r", failed)]


def test_every_child_sees_every_load():
    engine = Lockstep()
    engine.admit("r", 1)
    engine.admit("s", 0)
    engine.step()
    engine.report(0, recving={"s"}, failed={"s"})
    engine.report(1, recving={"r"})
    engine.step()
    for fake in engine.scheduler.sub_connectors:
        ((seen,),) = fake.called("update_connector_output")[-1:]
        assert (seen.finished_recving, seen.failed_recving) == ({"r", "s"}, {"s"})


# ---- What a child sets in the scheduler's output.


@pytest.mark.parametrize("store", [True, False])
def test_hisparses_flag_reaches_the_workers_also_when_a_request_is_hidden_from_it(store):
    hisparse = {**HISPARSE, "kv_connector_extra_config": {"name": "hisparse", "store": store}}
    connector = multi(child("b"), hisparse)
    hidden = request("hidden")
    connector.on_new_request(hidden)
    connector.get_num_new_matched_tokens(hidden, 0)
    connector.update_state_after_alloc(hidden, blocks(4), 0)
    output = scheduler_output()
    connector.build_connector_meta(output)
    assert output.has_sync_kv_loads


def test_whatever_a_child_sets_in_its_view_is_taken_back_but_not_what_hides_requests():
    connector = multi(child("a", store=False))
    connector.on_new_request(request("hidden"))
    connector.get_num_new_matched_tokens(request("hidden"), 0)
    connector.update_state_after_alloc(request("hidden"), blocks(4), 0)
    output = scheduler_output()
    output.num_scheduled_tokens = {"hidden": 7}
    output.total_num_scheduled_tokens = 7
    output.preempted_req_ids = {"hidden"}
    before = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    mine = {"new_block_ids_to_zero": [1], "has_sync_kv_loads": True, "num_invalid_spec_tokens": {"x": 1}}

    def build(view):
        assert view.num_scheduled_tokens == {}
        for name, value in mine.items():
            setattr(view, name, value)
        return FakeMetadata("a")

    connector.sub_connectors[0].answers["build_connector_meta"] = build
    connector.build_connector_meta(output)
    assert {field.name: getattr(output, field.name) for field in dataclasses.fields(output)} == {**before, **mine}


def test_moriios_blocks_that_need_no_zeroing_are_taken_back():
    connector = multi(own("moriio", "MoRIIOProducer"))
    moriio = connector.sub_connectors[0].connector_scheduler
    moriio._has_mamba = True
    moriio._reqs_need_recv["x"] = (to_be_decoded_elsewhere("x"), [[3]])
    moriio._reqs_need_recv["x"][0].kv_transfer_params = {}
    connector._scheduler._filters[0].add_unknown("older")
    output = scheduler_output()
    output.new_block_ids_to_zero = [2, 3]
    with pytest.MonkeyPatch.context() as patch:
        from tests.multi_connector.vllms_own import moriio as module

        patch.setattr(module.MoRIIOConnectorMetadata, "add_new_req", lambda *args, **kwargs: None)
        connector.build_connector_meta(output)
    assert output.new_block_ids_to_zero == [2]
    assert by_label(tally_of(connector), "errors") == {}


def test_a_child_that_raises_in_the_reports_changes_nothing():
    engine = Lockstep()
    engine.finish("r", 0)

    def changes_and_raises(output):
        output.finished_sending = None
        raise Boom

    engine.scheduler.sub_connectors[0].answers["update_connector_output"] = changes_and_raises
    engine.report(0, sending={"r"})
    assert engine.step().finished_sending == {"r"}


def test_results_of_the_older_hook_are_taken_too():
    """MoRIIO and most others answer get_finished alone; the interface's get_transfer_results asks it."""
    engine = Lockstep(MORIIO)
    assert engine.workers[0].get_transfer_results(set()) == KVConnectorTransferResults()
    assert engine.workers[0].get_finished(set()) == (None, None)
