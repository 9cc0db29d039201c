# SPDX-License-Identifier: Apache-2.0
import contextlib

import pytest
from vllm.v1.outputs import KVConnectorOutput

from tests.multi_connector.fakes import (
    FAULTS,
    FakeHandshake,
    FakeMetadata,
    blocks,
    child,
    request,
    scheduler_output,
)
from tests.multi_connector.lockstep import Lockstep, rebuilt
from vllm_overlay.multi_connector.lifecycle import Phase
from vllm_overlay.multi_connector.metadata import MultiWorkerMetadata


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_child_comes_back_as_a_new_instance_everywhere(ranks):
    engine = Lockstep(ranks=ranks)
    old = engine.fakes(0)
    old[0].raising = {"build_connector_meta"}
    engine.step()
    engine.step()
    assert engine.state() is Phase.OPEN
    assert engine.recover()
    engine.step()  # the workers hear that it serves
    new = engine.fakes(0)
    assert not {id(one) for one in new} & {id(one) for one in old}
    assert [len(one.called("shutdown")) for one in old] == [1] * len(old)
    assert [name for name, *_ in new[0].calls[:3]] == [
        "bind_kv_cache_manager",
        "bind_gpu_block_pool",
        "set_xfer_handshake_metadata_pp_aware",
    ]
    assert "reset_cache" in [name for name, *_ in new[0].calls]
    for rank, fake in enumerate(new[1:]):
        assert fake.called("register_kv_caches") == [[{"layer": rank}]]
        assert fake.called("set_host_xfer_buffer_ops") == [["copy"]]
        assert fake.called("bind_connector_metadata") == [[FakeMetadata("a")]]
    engine.admit("r", 0)
    engine.step()
    for rank in range(ranks):
        engine.report(0, rank=rank, recving={"r"})
    assert engine.step().finished_recving == {"r"}


@pytest.mark.parametrize(("served_s", "pause_s"), [(59.0, 2.0), (60.0, 1.0)])
def test_each_failure_doubles_the_pause_unless_the_child_has_served_for_the_longest(served_s, pause_s):
    engine = Lockstep(retry_first_s=1, retry_longest_s=60)
    engine.fail()
    assert engine.recover()
    engine.clock.now += served_s
    engine.fail()
    engine.step()
    phases = []
    for wait_s in (pause_s - 0.1, 0.2):
        engine.clock.now += wait_s
        engine.plan()
        phases.append(engine.state())
    assert phases == [Phase.OPEN, Phase.HALF_OPEN]


def test_its_new_workers_handshake_reaches_its_new_scheduler_side():
    engine = Lockstep()
    engine.fail()
    rebuilt(engine.workers[0], lambda fake: fake.answers.update(get_handshake_metadata=FakeHandshake("new")))
    assert engine.recover()
    assert engine.scheduler.sub_connectors[0].called("set_xfer_handshake_metadata_pp_aware") == [
        [{(0, 0): FakeHandshake("new")}]
    ]


def test_it_gets_no_hook_between_its_failure_and_its_return():
    engine = Lockstep()
    engine.fail()
    old = engine.scheduler.sub_connectors[0]
    before = len(old.calls)
    for _ in range(3):
        engine.scheduler.on_new_request(request("x"))
        engine.scheduler.get_num_new_matched_tokens(request("x"), 0)
        engine.step()
    engine.finish("x")
    assert [name for name, *_ in old.calls[before:]] == []


@pytest.mark.parametrize("error", FAULTS)
@pytest.mark.parametrize("where", ["scheduler", "worker"])
@pytest.mark.parametrize("hook", ["__init__", "bind_kv_cache_manager", "register_kv_caches", "reset_cache"])
def test_an_instance_that_cannot_be_built_leaves_the_child_out_and_is_tried_again(where, hook, error):
    engine = Lockstep(ranks=2)
    engine.fail()
    broken, tries = [True], []

    def make(fake):
        tries.append(fake)
        if hook == "__init__" and broken[0]:
            raise error("__init__")
        fake.raising, fake.error = {hook} if broken[0] else set(), error

    rebuilt(engine.scheduler if where == "scheduler" else engine.workers[1], make)
    called = hook == "__init__" or (hook == "register_kv_caches") == (where == "worker")
    assert engine.recover(steps=3) == (not called)
    assert len(tries) == 1  # a pause comes before the next
    engine.admit("r", 1)
    engine.report(1, rank=0, recving={"r"})
    engine.report(1, rank=1, recving={"r"})
    assert engine.step().finished_recving == {"r"}
    broken[0] = False
    assert engine.recover(steps=6) or engine.recover(steps=6)
    engine.step()
    # A failed attempt is no new isolation.
    assert (engine.told("isolations"), engine.told("returns")) == (1, 1)


@pytest.mark.parametrize("hook", ["__init__", "reset_cache", "shutdown"])
def test_a_pause_begins_when_the_attempt_has_failed_however_long_that_took(hook):
    """Or an engine whose child waits for a dead server would do nothing else."""
    engine, tries = Lockstep(), []

    def fails_late(*_):
        tries.append(hook)
        engine.clock.now += 300
        raise RuntimeError(hook)

    if hook == "shutdown":
        engine.workers[0].sub_connectors[0].answers[hook] = fails_late
    engine.fail()

    def make(fake):
        if hook == "__init__":
            fails_late()
        if hook == "reset_cache":
            fake.answers[hook] = fails_late

    rebuilt(engine.scheduler, make)
    engine.recover(steps=10)
    assert tries == [hook]


def test_requests_older_than_the_instance_are_never_shown_to_it():
    engine = Lockstep()
    for name in ("old", "older"):
        engine.scheduler.on_new_request(request(name))
        engine.scheduler.get_num_new_matched_tokens(request(name), 0)
        engine.scheduler.update_state_after_alloc(request(name), blocks(1), 0)
    engine.fail()
    engine.scheduler.on_new_request(request("meanwhile"))
    assert engine.recover()
    engine.step()
    new = engine.scheduler.sub_connectors[0]
    for name in ("old", "meanwhile"):
        engine.scheduler.get_num_new_matched_tokens(request(name), 0)
        engine.scheduler.update_state_after_alloc(request(name), blocks(1), 0)
        engine.finish(name)
    assert not new.called("get_num_new_matched_tokens") and not new.called("update_state_after_alloc")
    assert not new.called("request_finished_all_groups")
    engine.workers[0].sub_connectors[0].calls.clear()
    engine.workers[0].get_transfer_results({"old", "new"})
    assert engine.workers[0].sub_connectors[0].called("get_transfer_results") == [[{"new"}]]
    engine.finish("older")
    engine.step()
    engine.workers[0].get_transfer_results({"older", "meanwhile"})
    assert engine.tables_are_empty()


def test_an_answer_to_an_older_order_is_none_to_the_present_one():
    engine = Lockstep()
    metadata = engine.scheduler.build_connector_meta(scheduler_output())
    engine.workers[0].bind_connector_metadata(metadata)
    late = MultiWorkerMetadata((None, None), metadata.orders, frozenset({0}))
    engine.fail()
    assert engine.recover()
    engine.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=late))
    assert engine.state() is Phase.SERVING


def test_ranks_that_answer_different_orders_have_not_answered_yet():
    engine = Lockstep()
    first = engine.scheduler.build_connector_meta(scheduler_output()).orders
    engine.scheduler.sub_connectors[0].raising = {"on_new_request"}
    engine.scheduler.on_new_request(request())
    second = engine.scheduler.build_connector_meta(scheduler_output()).orders
    state = engine.state()
    ranks = [MultiWorkerMetadata((None, None), orders) for orders in (first, second)]
    engine.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=ranks[0].aggregate(ranks[1])))
    assert engine.state() is state
    engine.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=ranks[1].aggregate(ranks[1])))
    assert engine.state() is not state


def test_an_idle_engine_goes_on_stepping_while_workers_must_be_told_but_not_while_it_rests():
    engine = Lockstep()
    assert not engine.scheduler.has_pending_push_work()
    engine.scheduler.sub_connectors[0].raising = {"on_new_request"}
    engine.scheduler.on_new_request(request())
    assert engine.scheduler.has_pending_push_work()
    engine.step()
    assert not engine.scheduler.has_pending_push_work()
    engine.clock.now += 100
    answers = engine.run(engine.plan())
    assert engine.scheduler.has_pending_push_work()  # half open: the workers' answers are still to come
    engine.scheduler.update_connector_output(answers)
    engine.step()
    assert not engine.scheduler.has_pending_push_work()


def test_a_child_that_cannot_be_stopped_keeps_its_blocks_until_it_has_reported_them():
    engine = Lockstep(child("a", "UnstoppableChild"), child("b"))
    engine.admit("r", 0)
    engine.finish("s", 0)
    engine.step()
    engine.workers[0].sub_connectors[0].raising = {"wait_for_save"}
    for _ in range(3):
        output = engine.step()
        assert (output.finished_recving, output.finished_sending) == (None, None)
    assert not engine.recover()
    assert engine.tallies["a"].gauges.items() >= {"state": 1.0, "quarantined_requests": 2.0}.items()
    engine.report(0, recving={"r"}, failed={"r"}, sending={"s"})
    output = engine.step()
    assert (output.failed_recving, output.finished_sending) == ({"r"}, {"s"})
    assert engine.recover()


def test_a_child_whose_shutdown_raises_is_shut_down_again_after_a_pause_and_then_comes_back():
    engine = Lockstep()
    engine.admit("r", 0)
    bad = engine.workers[0].sub_connectors[0]
    bad.raising = {"start_load_kv", "shutdown"}
    for _ in range(3):
        assert engine.step().finished_recving is None
    assert len(bad.called("shutdown")) == 1
    engine.clock.now += 1.0
    engine.step()
    assert len(bad.called("shutdown")) == 2
    bad.raising = set()
    engine.clock.now += 2.0
    assert engine.step().failed_recving == {"r"}
    assert engine.recover()


def test_a_load_that_is_never_reported_isolates_its_child_and_fails():
    engine = Lockstep(isolate_after_s=30)
    engine.admit("r", 0)
    engine.step()
    engine.clock.now += 29
    assert engine.step().finished_recving is None
    engine.clock.now += 2
    assert engine.step().failed_recving == {"r"}
    assert len(engine.workers[0].sub_connectors[0].called("shutdown")) == 1


def test_a_child_in_whose_memory_the_cache_lives_is_never_shut_down_nor_replaced():
    engine = Lockstep()
    for connector in engine.workers:
        connector.sub_connectors[0].answers["get_mem_pool_context"] = contextlib.nullcontext()
        connector.get_mem_pool_context()
    engine.admit("r", 0)
    engine.workers[0].sub_connectors[0].raising = {"start_load_kv"}
    assert engine.step().finished_recving is None
    assert engine.step().finished_recving is None
    engine.report(0, recving={"r"}, failed={"r"})
    assert engine.step().failed_recving == {"r"}
    assert not engine.recover()
    assert not engine.workers[0].sub_connectors[0].called("shutdown")


def test_a_request_that_ends_while_its_child_is_being_stopped_keeps_its_blocks_till_then():
    engine = Lockstep()
    engine.scheduler.update_state_after_alloc(request("r"), blocks(1), 0)
    engine.workers[0].sub_connectors[0].raising = {"start_load_kv", "shutdown"}
    engine.admit("load", 0)
    engine.step()
    engine.step()
    assert engine.finish("r")  # the child may still read its blocks
    engine.scheduler.on_new_request(request("new"))
    assert not engine.finish("new")  # it never saw this one
    engine.workers[0].sub_connectors[0].raising = set()
    engine.clock.now += 10
    assert engine.step().finished_sending == {"r"}


def test_what_was_held_for_the_old_instance_is_not_expected_of_the_new_one():
    engine = Lockstep()
    engine.scheduler.update_state_after_alloc(request("r"), blocks(1), 0)
    engine.scheduler.sub_connectors[0].raising = {"build_connector_meta"}
    metadata = engine.scheduler.build_connector_meta(scheduler_output())
    (worker_side,) = engine.workers
    worker_side.bind_connector_metadata(metadata)
    worker_side.get_transfer_results(set())
    reports = worker_side.build_connector_worker_meta()
    assert engine.finish("r")  # while it is being stopped
    assert engine.scheduler.has_pending_push_work()  # or an idle engine would keep its blocks
    engine.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=reports))
    engine.clock.now += 100  # and the pause is over before the workers hear of the hold
    assert engine.step().finished_sending == {"r"}
    assert engine.recover()
    engine.step()
    assert engine.tables_are_empty()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_time_a_child_leaves_service_is_one_isolation_in_however_many_processes_it_fails(ranks):
    engine = Lockstep(ranks=ranks)
    for number in range(1, 4):
        scheduler_side, *worker_sides = engine.fakes(0)
        scheduler_side.raising = {"update_connector_output"}
        for fake in worker_sides:
            fake.raising = {"start_load_kv"}
        for _ in range(4):
            engine.step()
        assert (engine.told("isolations"), engine.told("returns")) == (number, number - 1)
        assert engine.recover()
        engine.step()
        assert (engine.told("isolations"), engine.told("returns")) == (number, number)


def test_a_child_out_of_service_is_in_every_report_and_its_return_in_one():
    """The first report has the state of all, because several API servers may still show what one before was told."""
    engine = Lockstep()

    def reported():
        engine.tallies["a"].gauges.clear()
        engine.step()
        return engine.tallies["a"].gauges.get("state")

    assert reported() == 0
    engine.scheduler.sub_connectors[0].raising = {"build_connector_meta"}
    assert [reported() for _ in range(4)] == [2, 2, 2, 2]
    engine.clock.now += 100
    assert [state for _ in range(4) if (state := reported()) != 3][:2] == [0, None]
