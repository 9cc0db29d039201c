# SPDX-License-Identifier: Apache-2.0
"""What passes of the workers' reports, on vLLM's real scheduler."""

import pytest
from vllm.v1.request import RequestStatus

from tests.multi_connector.fakes import child
from tests.multi_connector.report_fuzz import MODES, ConnectedScheduler, wrong_seeds

SEEDS = 3


@pytest.mark.parametrize("mode", MODES)
def test_random_children_free_no_block_too_early_and_leave_nothing(mode):
    wrong, seen = wrong_seeds(mode, first=0, seeds=SEEDS)
    assert wrong == {}
    assert seen["aborted"] and seen["held"] and seen["reported early"] and seen["failed a load"]
    assert bool(seen["raised"]) == bool(MODES[mode].raises)


@pytest.mark.parametrize("mode", ["plain", "async-tp"])
@pytest.mark.parametrize("order", [("load", "save"), ("save", "load"), ("both",)], ids="-".join)
def test_a_request_aborted_while_one_child_loads_and_another_holds_it_leaves_nothing(order, mode):
    engine = ConnectedScheduler(child("a"), child("b"), mode=MODES[mode])
    loader, holder = engine.scheduler.connector.sub_connectors
    loader.answers["get_num_new_matched_tokens"] = (64, True)
    holder.answers["request_finished_all_groups"] = (True, None)
    engine.add("r", list(range(100)), 4)
    engine.step()
    assert engine.scheduler.requests["r"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.abort("r")
    for reported in order:
        assert engine.left()["blocks"] > 0
        for rank in range(MODES[mode].ranks):
            if reported != "save":
                engine.lockstep.report(0, rank, recving=["r"])
            if reported != "load":
                engine.lockstep.report(1, rank, sending=["r"])
        engine.step()
    engine.step()
    engine.step()
    assert (engine.left(), engine.faults) == ({}, {})
