# SPDX-License-Identifier: Apache-2.0
"""vLLM's own connectors as children: what they expect of a MultiConnector, on a machine without their libraries.

The constructors of NIXL's and HiSparse's open connections, so they are not run. An object gets just the state that the
tested methods read. The methods are vLLM's own.
"""

import dataclasses
import queue
from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hisparse.connector import (
    HiSparseConnector,
    HiSparseConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.request import RequestStatus

from tests.multi_connector import tables
from tests.multi_connector.fakes import Boom, FakeMetadata, blocks, child, multi, scheduler_output
from tests.multi_connector.lockstep import Lockstep, admit


def not_here(self, *args, **kwargs):
    """For a hook that needs a network or a GPU."""


class NixlProducer(NixlBaseConnector):
    """The side that prefills. Its scheduler's half is not run: the test says what it answers and sends."""

    def __init__(self, vllm_config, role, kv_cache_config):
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.kv_transfer_config = vllm_config.kv_transfer_config
        self.connector_scheduler = MagicMock()
        self.connector_scheduler.get_num_new_matched_tokens.return_value = (0, False)
        self.connector_scheduler.build_connector_meta.side_effect = lambda output: KVConnectorMetadata()
        self.connector_worker = None if role == KVConnectorRole.SCHEDULER else nixl_worker()

    register_kv_caches = set_host_xfer_buffer_ops = get_kv_connector_stats = not_here
    start_load_kv = wait_for_save = not_here


def nixl_worker():
    made = object.__new__(NixlPullConnectorWorker)
    flags = ("pcp_dcp_sharded", "use_host_buffer", "enable_permute_local_kv", "enable_heterogeneous_attn_post_process")
    vars(made).update(
        dict.fromkeys((*flags, "_has_mamba", "_is_hma_required"), False),
        transfer_topo=object(),
        tp_rank=0,
        pcp_rank=0,
        _physical_blocks_per_logical_kv_block=1,
        nixl_wrapper=SimpleNamespace(get_new_notifs=dict),
        xfer_stats=MagicMock(),
        consumer_notification_counts_by_req=defaultdict(int),
        expected_consumer_notifications_by_req={},
        _recving_transfers={},
        _recving_metadata={},
        _recv_failures=set(),
        _replicated_pcp_done_sending=set(),
        _failed_recv_reqs=queue.Queue(),
        _invalid_block_ids=queue.Queue(),
        _reqs_to_process=set(),
        _reqs_to_send={},
        _cleanup_remote_engines=lambda: None,
        shutdown=lambda: None,
    )
    return made


class HiSparse(HiSparseConnector):
    """The scheduler's half; in a worker it does nothing."""

    def __init__(self, vllm_config, role, kv_cache_config):
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_worker = None
        self.connector_scheduler = HiSparseConnectorScheduler(async_speculative=False)
        # A real one needs a cache manager with a host pool. This one has nothing to do.
        nothing = {
            "build_offload_command": None,
            "take_host_block_copies": (),
            "all_context_pages_resident": True,
            "take_residency_updates": {},
            "build_row_mirrors": (),
            "has_pending_work": False,
            "has_pending_reclamation": False,
        }
        answers = {f"{method}.return_value": answer for method, answer in nothing.items()}
        self.connector_scheduler.bind_coordinator(MagicMock(host_group_id=0, **answers))

    bind_kv_cache_manager = register_kv_caches = start_load_kv = finish_forward = not_here
    build_connector_worker_meta = get_kv_connector_stats = not_here


class Offloading(OffloadingConnector):
    """The scheduler's half, once a request has finished whose store (job 7) still reads block 5."""

    def __init__(self, vllm_config, role, kv_cache_config):
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_scheduler = object.__new__(OffloadingConnectorScheduler)
        vars(self.connector_scheduler).update(
            config=SimpleNamespace(blocks_per_chunk=1),
            manager=MagicMock(),
            _sliding_window_groups=(),
            _req_status={},
            _current_batch_load_jobs={},
            _current_batch_jobs_to_flush=set(),
            _current_batch_allocated_block_ids=set(),
            _block_id_to_pending_jobs={5: {7}},
        )

    on_new_request = shutdown = not_here

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False


def own(name, cls, **extra):
    """One of vLLM's own connectors as a child."""
    return {**child(name, cls, **extra), "kv_connector_module_path": __name__}


NIXL, HISPARSE = own("nixl", "NixlProducer"), own("hisparse", "HiSparse")


def started(engine):
    """A request that waits for nothing and has been scheduled. Once finished, another engine is to decode it."""
    r = SimpleNamespace(
        request_id="r",
        num_tokens=1000,
        num_prompt_tokens=1000,
        num_computed_tokens=1000,
        shared_prefix_boundary=0,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        kv_transfer_params={"do_remote_decode": True, "transfer_id": "its transfer"},
    )
    engine.scheduler.on_new_request(r)
    assert engine.scheduler.get_num_new_matched_tokens(r, 0)[0] == 0
    engine.scheduler.update_state_after_alloc(r, blocks(4, 5), 0)
    return r


def finish(engine, r):
    return engine.scheduler.request_finished_all_groups(r, ([4, 5],))[0]


def acknowledge(engine, r):
    """The decoding side tells the next step's worker that it has the request's blocks."""
    nixl = engine.workers[0].sub_connectors[0].connector_worker
    nixl._reqs_to_process.add(r.request_id)
    told = [{"peer": [f"{r.request_id}:1".encode()]}]
    nixl.nixl_wrapper.get_new_notifs = lambda: told.pop() if told else {}


def is_over(engine):
    return engine.tables_are_empty() and not any(map(tables.living, engine.workers))


@pytest.mark.parametrize("is_held", [True, False])
def test_an_early_report_does_not_free_what_a_sibling_still_reads(is_held):
    engine = Lockstep(NIXL, child("b"))
    r = started(engine)
    acknowledge(engine, r)
    engine.step()
    engine.scheduler.sub_connectors[0].connector_scheduler.request_finished.return_value = (is_held, None)
    engine.scheduler.sub_connectors[1].answers["request_finished_all_groups"] = (is_held, None)
    assert finish(engine, r) == is_held
    assert engine.step().finished_sending is None
    if is_held:
        engine.report(1, sending={"r"})
        assert engine.step().finished_sending == {"r"}
        engine.step()
    assert is_over(engine)


@pytest.mark.parametrize("ranks", [1, 2])
def test_early_reports_of_all_ranks_free_the_blocks_once_the_request_is_finished(ranks):
    engine = Lockstep(ranks=ranks)
    r = started(engine)
    engine.step()
    for rank in range(ranks):
        engine.report(0, rank, sending={"r"})
        assert engine.step().finished_sending is None
    engine.scheduler.sub_connectors[0].answers["request_finished_all_groups"] = (True, None)
    assert finish(engine, r)
    assert engine.step().finished_sending == {"r"}
    engine.step()
    assert is_over(engine)


def test_a_notice_that_overtakes_nixls_own_metadata_is_not_lost():
    """With asynchronous scheduling a rank hears from the decoding side before it hears that the request is finished."""
    engine = Lockstep(NIXL, child("b"))
    scheduler_side = engine.scheduler.sub_connectors[0]
    r = started(engine)
    engine.step()
    overtaken = engine.plan()
    scheduler_side.connector_scheduler.request_finished.return_value = (True, None)
    assert finish(engine, r)
    acknowledge(engine, r)
    output = engine.run(overtaken)
    assert output.finished_sending is None
    engine.scheduler.update_connector_output(output)
    assert engine.step().finished_sending == {"r"}
    engine.step()
    assert is_over(engine)
    assert engine.told("ignored_reports") == 0


def raises_after_a_change(output):
    output.finished_sending = None
    raise Boom


CHANGES = {
    **{
        f"{field} is {name}": lambda output, field=field, left=left: setattr(output, field, left)
        for field in ("finished_sending", "finished_recving")
        for name, left in {"none": None, "another set": {"r", "s"}, "7": 7, "a string": "r", "a list": [object]}.items()
    },
    "in place": lambda output: output.finished_recving.clear(),
    "and raises": raises_after_a_change,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_child_that_changes_the_reports_leaves_service_and_the_reports_stand(change):
    engine = Lockstep()
    engine.admit("r", 1)
    engine.step()
    engine.finish("r", 0)
    engine.scheduler.sub_connectors[0].answers["update_connector_output"] = change
    engine.report(0, sending={"r"})
    engine.report(1, recving={"r"})
    output = engine.step()
    assert (output.finished_sending, output.finished_recving) == ({"r"}, {"r"})
    assert [child.isolated for child in engine.scheduler._children] == [True, False]
    ((seen,),) = engine.scheduler.sub_connectors[1].called("update_connector_output")[-1:]
    assert (seen.finished_sending, seen.finished_recving) == (None, {"r"})


def test_with_a_report_from_one_rank_alone_the_others_owe_nothing_once_it_has_come():
    """As with ExampleHiddenStatesConnector."""
    engine = Lockstep(child("a"), ranks=2)
    engine.scheduler.sub_connectors[0].answers["get_finished_count"] = 1
    engine.aggregator = type(engine.aggregator).from_connector(engine.scheduler, 2)
    engine.finish("r", 0)
    engine.report(0, rank=0, sending={"r"})
    assert engine.step().finished_sending == {"r"}
    assert tables.of_worker(engine.workers[1]) == 1
    assert engine.step().finished_sending is None
    assert engine.tables_are_empty()


@pytest.mark.parametrize("failed", [False, True])
def test_hisparse_sees_what_its_sibling_has_received(failed):
    engine = Lockstep(child("b"), HISPARSE)
    engine.admit("r", 0)
    engine.step()
    engine.report(0, recving={"r"}, failed={"r"} if failed else ())
    engine.step()
    imported = engine.scheduler.sub_connectors[1].connector_scheduler.coordinator.finish_host_import
    imported.assert_called_once_with("r", failed=failed)


@pytest.mark.parametrize("store", [True, False])
def test_hisparses_flag_reaches_the_workers_also_when_a_request_is_hidden_from_it(store):
    connector = multi(child("b"), own("hisparse", "HiSparse", store=store))
    admit(connector, "hidden")
    output = scheduler_output()
    connector.build_connector_meta(output)
    assert output.has_sync_kv_loads


def test_whatever_a_child_sets_in_its_view_is_taken_back_but_not_what_hides_requests():
    connector = multi(child("a", store=False))
    admit(connector, "hidden")
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


@pytest.mark.parametrize("is_hidden", [True, False], ids=["a hidden request", "a sibling's load"])
def test_offloading_ends_a_store_before_its_blocks_are_written_by_whom_it_does_not_see(is_hidden):
    """It does not hold the blocks of a finished request. It ends a store when it hears that they have another owner."""
    connector = multi(own("offloading", "Offloading", store=not is_hidden), child("b"))
    output = scheduler_output()
    if is_hidden:
        admit(connector, "r")
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = {"r": 1}, 1
        output.scheduled_cached_reqs = CachedRequestData(["r"], set(), [], {}, [([4, 5],)], [64], [1])
    else:
        connector.sub_connectors[1].answers["get_num_new_matched_tokens"] = (64, True)
        admit(connector, "r", ids=(4, 5))
    metadata = connector.build_connector_meta(output)
    assert metadata.children[0].jobs_to_flush == {7}
    assert output.kv_cache_block_copies is None
    assert connector.build_connector_meta(scheduler_output()).children[0].jobs_to_flush == set()


def test_results_of_the_older_hook_are_taken_too():
    """Most connectors answer get_finished alone; the interface's get_transfer_results asks it."""
    engine = Lockstep()
    engine.admit("r", 0)
    engine.workers[0].bind_connector_metadata(engine.plan())
    engine.workers[0].sub_connectors[0].answers["get_finished"] = (None, {"r"})
    assert engine.workers[0].get_transfer_results(set()) == KVConnectorTransferResults(finished_recving={"r"})
    assert engine.workers[0].get_finished(set()) == (None, None)
