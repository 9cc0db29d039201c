# SPDX-License-Identifier: Apache-2.0
"""No shared fate: a child that fails is taken out of service, and the requests go on."""

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tests.multi_connector.fakes import Boom, blocks, multi, request, scheduler_output, worker
from tests.multi_connector.lockstep import Lockstep, by_label, tally_of
from vllm_overlay.multi_connector.metadata import NULL_BLOCK


@pytest.mark.parametrize("hook", ["update_state_after_alloc", "build_connector_meta"])
def test_a_load_whose_child_fails_before_it_is_sent_is_told_failed(hook):
    engine = Lockstep()
    engine.scheduler.sub_connectors[0].raising = {hook}
    engine.admit("r", 0)
    output = engine.step()
    assert (output.finished_recving, output.failed_recving) == ({"r"}, {"r"})
    # The workers' child never saw it and was shut down before the report.
    (fake, other) = engine.workers[0].sub_connectors
    assert fake.calls[-1][0] == "shutdown" and not fake.called("bind_connector_metadata")
    assert len(other.called("handle_preemptions")) == 1
    assert engine.scheduler.get_num_new_matched_tokens(request("next"), 0) == (0, False)
    engine.finish("next")
    engine.finish("r")
    assert engine.tables_are_empty()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("hook", ["handle_preemptions", "start_load_kv", "get_transfer_results"])
def test_a_workers_child_that_raises_is_shut_down_before_its_loads_and_saves_are_released(hook, ranks):
    engine = Lockstep(ranks=ranks)
    engine.admit("r", 0)
    engine.finish("s", 0, 1)
    bad = engine.workers[-1].sub_connectors[0]
    bad.raising = {hook}
    for rank in range(ranks):
        engine.report(1, rank=rank, sending={"s"})
    output = engine.step()
    if ranks == 2:
        assert output.finished_recving is None  # the other rank's child has not ended its part yet
        output = engine.step()  # now the scheduler knows, and so does the other rank
    assert (output.finished_recving, output.failed_recving) == ({"r"}, {"r"})
    assert output.finished_sending == {"s"}
    for connector in engine.workers:
        fake, other = connector.sub_connectors
        assert len(fake.called("shutdown")) == 1 and not other.called("shutdown")
    assert bad.calls[-1][0] == "shutdown" or ranks == 1
    assert engine.scheduler._children[0].isolated
    engine.finish("r")
    engine.step()
    assert engine.tables_are_empty()


def test_a_load_that_a_child_out_of_service_never_saw_is_told_failed_even_if_it_cannot_be_shut_down():
    engine = Lockstep()
    engine.workers[0].sub_connectors[0].raising = {"start_load_kv", "shutdown"}
    metadata = engine.scheduler.build_connector_meta(scheduler_output())
    engine.workers[0].bind_connector_metadata(metadata)
    engine.workers[0].start_load_kv(None)
    engine.admit("r", 0)
    assert engine.step().failed_recving == {"r"}


def test_loads_reported_good_while_their_errors_could_not_be_asked_for_are_told_failed():
    engine = Lockstep()
    engine.admit("r", 0)
    engine.workers[0].sub_connectors[0].raising = {"get_block_ids_with_load_errors"}
    engine.report(0, recving={"r"})
    assert engine.step().failed_recving == {"r"}


def test_a_worker_tells_of_an_isolation_until_the_scheduler_has_heard():
    engine = Lockstep()
    engine.workers[0].sub_connectors[0].raising = {"start_load_kv"}
    assert engine.step().kv_connector_worker_meta.broken == {0}
    output = engine.step().kv_connector_worker_meta
    assert (output.broken, output.unstopped) == (frozenset(), frozenset())
    assert engine.told("isolations") == 1


def test_a_save_promised_by_a_child_that_raises_in_finishing_is_held_until_the_workers_stop_it():
    engine = Lockstep()
    engine.scheduler.sub_connectors[0].raising = {"request_finished_all_groups"}
    assert engine.finish("r")
    assert engine.step().finished_sending == {"r"}
    assert not engine.finish("later")
    assert engine.tables_are_empty()


def test_a_preempted_request_is_not_blamed_for_another_childs_bad_blocks():
    engine = Lockstep()
    engine.admit("r", 0, asynchronous=False)
    engine.step()
    engine.scheduler.build_connector_meta(scheduler_output(preempted={"r"}))
    engine.admit("s", 1)
    engine.workers[0].sub_connectors[1].answers["get_block_ids_with_load_errors"] = {4}
    engine.step()
    assert engine.told("failed_loads", "a") == 0


def test_a_synchronous_load_that_fails_is_counted_for_its_own_child():
    engine = Lockstep()
    engine.admit("r", 0, asynchronous=False)
    engine.scheduler.update_state_after_alloc(engine.offer("s", 1, asynchronous=False), blocks(6, 7), 64)
    engine.workers[0].sub_connectors[0].raising = {"start_load_kv"}
    engine.step()
    assert [engine.told("failed_loads", name) for name in "ab"] == [1, 0]


def test_a_good_synchronous_load_needs_no_report():
    engine = Lockstep()
    engine.admit("r", 0, asynchronous=False)
    output = engine.step()
    assert (output.invalid_block_ids, output.finished_recving) == (set(), None)
    assert engine.told("loaded_tokens") == 64


def test_a_failed_synchronous_load_invalidates_the_blocks_of_all_groups_that_follow_the_local_hit():
    engine = Lockstep(groups=(16, 32))
    r = engine.offer("r", 0, tokens=48, asynchronous=False, num_local=32)
    engine.scheduler.update_state_after_alloc(
        r, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4, 5], [6, 0, 7])), 48
    )
    engine.workers[0].sub_connectors[0].raising = {"start_load_kv"}
    output = engine.step()
    assert (output.invalid_block_ids, output.finished_recving, output.failed_recving) == ({3, 4, 5, 7}, None, set())


@pytest.mark.parametrize("shutdown", ["raises", "is the interface's own"])
def test_a_synchronous_load_of_a_child_that_cannot_be_stopped_fails_all_the_same(shutdown, monkeypatch):
    engine = Lockstep()
    engine.admit("r", 0, asynchronous=False)
    fake = engine.workers[0].sub_connectors[0]
    fake.raising = {"start_load_kv", "shutdown"}
    if shutdown != "raises":
        monkeypatch.setattr(type(fake), "shutdown", KVConnectorBase_V1.shutdown)
    output = engine.step()
    assert (output.invalid_block_ids, output.failed_recving) == ({4, 5}, set())
    assert engine.step().invalid_block_ids == set()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_child_may_call_blocks_of_its_loads_bad_until_their_request_is_finished(asynchronous):
    engine = Lockstep()
    engine.admit("r", 0, asynchronous=asynchronous)
    bad_blocks = engine.workers[0].sub_connectors[0].answers
    bad_blocks["get_block_ids_with_load_errors"] = {NULL_BLOCK, 4}
    engine.report(0, recving={"r"} if asynchronous else ())
    output = engine.step()
    assert (output.invalid_block_ids, output.failed_recving) == ({4}, set())
    assert engine.told("failed_loads") == 1
    assert engine.step().invalid_block_ids == {4}
    assert not engine.workers[0]._children[0].isolated
    engine.finish("r")
    assert engine.step().invalid_block_ids == set()
    assert engine.workers[0]._children[0].isolated


def test_a_child_that_calls_blocks_bad_that_it_did_not_load_has_failed_and_only_its_own_count():
    engine = Lockstep()
    for request_id, child_index, ids in (("mine", 0, (4, 5)), ("open", 0, (6,)), ("other", 1, (7, 8))):
        engine.scheduler.update_state_after_alloc(engine.offer(request_id, child_index), blocks(*ids), 64)
    mine, _ = engine.workers[0].sub_connectors
    mine.answers["get_block_ids_with_load_errors"] = {5, 7, 99}
    engine.report(0, recving={"mine"})
    engine.report(1, recving={"other"})
    output = engine.step()
    assert output.invalid_block_ids == {5}
    assert output.finished_recving == {"mine", "open", "other"}
    assert output.failed_recving == {"mine", "open"}
    assert len(mine.called("shutdown")) == 1
    assert engine.scheduler._children[0].isolated


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
    assert by_label(tally_of(connector), "errors") == {"take_events": 3}


def test_shutdown_reaches_every_child_and_never_raises():
    connector = worker()
    a, b = connector.sub_connectors
    a.raising = {"shutdown"}
    connector.shutdown()
    connector.shutdown()
    assert (len(a.called("shutdown")), len(b.called("shutdown"))) == (2, 1)  # it is tried again while it raises
