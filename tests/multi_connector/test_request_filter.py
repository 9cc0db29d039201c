# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput

from tests.multi_connector import tables
from tests.multi_connector.fakes import blocks, child, multi, request, scheduler_output
from tests.multi_connector.lockstep import admit, answers_it
from vllm_overlay.multi_connector.settings import ChildSettings


def output_of(*request_ids, finished=()):
    """A scheduler's output in which these requests run."""
    return dataclasses.replace(
        SchedulerOutput.make_empty(),
        num_scheduled_tokens=dict.fromkeys(request_ids, 8),
        total_num_scheduled_tokens=8 * len(request_ids),
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(request_ids),
            resumed_req_ids=set(request_ids[:1]),
            new_token_ids=[],
            all_token_ids={name: [1] for name in request_ids},
            new_block_ids=[([number],) for number in range(len(request_ids))],
            num_computed_tokens=list(range(len(request_ids))),
            num_output_tokens=[0] * len(request_ids),
        ),
        finished_req_ids=set(finished),
        preempted_req_ids=set(request_ids),
        new_block_ids_to_zero=[1, 2],
        kv_connector_block_state=KVConnectorBlockState(
            set(request_ids), lambda name: ([9],), {name: [(0, 1, 2)] for name in request_ids}
        ),
    )


def seen_by(fake, connector, *request_ids):
    """What of a step with these requests reaches the child, in every field."""
    fake.calls.clear()
    connector.build_connector_meta(output_of(*request_ids, finished=request_ids))
    ((view,),) = fake.called("build_connector_meta")
    cached, state = view.scheduled_cached_reqs, view.kv_connector_block_state
    names = list(view.num_scheduled_tokens)
    assert cached.req_ids == names and set(cached.all_token_ids) == set(names)
    assert view.total_num_scheduled_tokens == 8 * len(names)
    assert cached.num_computed_tokens == [request_ids.index(name) for name in names]
    assert cached.new_block_ids == [([request_ids.index(name)],) for name in names]
    assert state.req_ids == view.preempted_req_ids == set(state.boundary_state_offloads) == set(names)
    assert cached.resumed_req_ids <= set(names)
    return names


def admitted(connector, name, *tokens):
    for fake, number in zip(connector.sub_connectors, tokens, strict=True):
        answers_it(fake, number)
    connector.on_new_request(request(name))
    admit(connector, name)


def test_a_child_that_sees_all_gets_the_schedulers_own_output():
    connector = multi()
    admitted(connector, "r", 0, 0)
    output = output_of("r")
    connector.build_connector_meta(output)
    assert connector.sub_connectors[0].called("build_connector_meta")[0][0] is output


def test_a_child_that_must_not_store_gets_no_work_of_a_request_but_its_end():
    connector = multi(child("a", store=False), child("b"))
    a, b = connector.sub_connectors
    admitted(connector, "r", 0, 0)
    assert not a.called("update_state_after_alloc") and b.called("update_state_after_alloc")
    assert seen_by(a, connector, "r") == []
    assert seen_by(b, connector, "r") == ["r"]
    connector.request_finished_all_groups(request("r"), ([1], [2]))
    ((_, ids),) = a.called("request_finished_all_groups")
    assert ids == ([], [])


def test_a_child_that_must_not_store_sees_of_what_it_loads_only_the_step_that_tells_it():
    connector = multi(child("a", store=False), child("b"))
    a, b = connector.sub_connectors
    admitted(connector, "r", 64, 0)
    assert seen_by(a, connector, "r", "s") == ["r", "s"]
    assert seen_by(a, connector, "r", "s") == ["s"]
    connector.update_state_after_alloc(request("r"), blocks(1), 0)
    assert not a.called("update_state_after_alloc")
    assert seen_by(b, connector, "r", "s") == ["r", "s"]


@pytest.mark.parametrize("promote", [True, False])
def test_what_another_child_loads_is_stored_only_where_it_is_to_be_promoted(promote):
    connector = multi(child("a", promote=promote), child("b", promote=False))
    a, b = connector.sub_connectors
    admitted(connector, "loaded", 0, 64)
    admitted(connector, "computed", 0, 0)
    assert seen_by(a, connector, "loaded", "computed") == (["loaded"] if promote else []) + ["computed"]
    assert seen_by(b, connector, "loaded", "computed") == ["loaded", "computed"]


def test_a_switch_that_is_flipped_concerns_requests_admitted_afterwards():
    connector = multi(child("a"), child("b"))
    a, _ = connector.sub_connectors
    admitted(connector, "before", 0, 0)
    control = connector._scheduler._control
    control.settings = {**control.settings, "a": ChildSettings(store=False)}
    admitted(connector, "after", 0, 0)
    connector.update_state_after_alloc(request("before"), blocks(1), 0)  # after a preemption, say
    assert seen_by(a, connector, "before", "after") == ["before"]
    for name in ("before", "after"):
        connector.request_finished_all_groups(request(name), ([],))
    connector.build_connector_meta(scheduler_output())
    assert not tables.of_scheduler(connector)
