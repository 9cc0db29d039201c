# SPDX-License-Identifier: Apache-2.0
"""Bad blocks that a connector reports after the step that has used them first: patch 0006, on the scheduler lab."""

import random
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

from devtools.poison.connector import PATH, Habits, PoisonConnector
from devtools.scheduler_lab import LabSettings, make_request, make_scheduler, runner_output, sampled_tokens

pytestmark = pytest.mark.patches

BLOCK = 16
SHARED = [7] * 4 * BLOCK


def started(num_state_groups: int, is_asynchronous: bool, policy: str = "recompute") -> tuple[Scheduler, LabSettings]:
    """Two requests that decode: the second has hit the first's prompt; and one with a prompt of its own."""
    PoisonConnector.habits = Habits(dice=random.Random(0), unit=BLOCK, share_of_hits=0.0)
    settings = LabSettings(
        block_size=BLOCK,
        num_state_groups=num_state_groups,
        is_asynchronous=is_asynchronous,
        kv_transfer_config=KVTransferConfig(
            kv_connector="PoisonConnector",
            kv_connector_module_path=PATH,
            kv_role="kv_both",
            kv_load_failure_policy=policy,
        ),
    )
    scheduler = make_scheduler(settings)
    for name, tokens in {"first": [*SHARED, 1], "second": [*SHARED, 2], "other": [8] * 3 * BLOCK}.items():
        scheduler.add_request(make_request(name, tokens, 40, settings))
        step(scheduler)
    step(scheduler)
    return scheduler, settings


def step(scheduler: Scheduler, bad_blocks: frozenset[int] = frozenset()) -> tuple[dict[str, int], list[Any]]:
    """What is planned, and who ends."""
    output = scheduler.schedule()
    report = KVConnectorOutput(invalid_block_ids=set(bad_blocks))
    result = scheduler.update_from_output(output, runner_output(sampled_tokens(scheduler, output), report))
    ended = [one.request_id for outputs in result.values() for one in outputs.outputs if one.finish_reason is not None]
    return dict(output.num_scheduled_tokens), ended


def block_of(scheduler: Scheduler, name: str, index: int) -> frozenset[int]:
    """Of the attention group."""
    return frozenset({scheduler.kv_cache_manager.get_block_ids(name)[0][index]})


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("num_state_groups", [0, 1, 2])
def test_who_runs_on_a_bad_block_or_has_hit_its_prefix_is_computed_again(num_state_groups, is_asynchronous):
    scheduler, settings = started(num_state_groups, is_asynchronous)
    step(scheduler, block_of(scheduler, "first", 1))
    fresh = make_request("fresh", [*SHARED, 3], 1, settings)
    assert scheduler.kv_cache_manager.get_computed_blocks(fresh)[1] <= BLOCK
    assert [request.request_id for request in scheduler.running] == ["other"]
    planned, _ = step(scheduler)
    assert planned["first"] >= 3 * BLOCK and planned["other"] == 1
    # The second hits what the first computes, once that is there.
    assert any("second" in step(scheduler)[0] for _ in range(4)) or "second" in planned


@pytest.mark.parametrize("num_state_groups", [0, 1])
def test_with_the_policy_fail_they_fail_and_the_other_goes_on(num_state_groups):
    scheduler, _ = started(num_state_groups, False, policy="fail")
    assert sorted(step(scheduler, block_of(scheduler, "first", 1))[1]) == ["first", "second"]
    assert step(scheduler)[0] == {"other": 1}


@pytest.mark.parametrize("num_state_groups", [0, 1])
def test_a_block_that_is_only_to_be_computed_or_that_nobody_holds_is_no_reason(num_state_groups):
    scheduler, _ = started(num_state_groups, False)
    # The step allocates it for the other, or nobody takes it.
    free = scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()[0].block_id
    assert step(scheduler, frozenset({free}))[1] == []
    assert step(scheduler)[0] == {"first": 1, "second": 1, "other": 1}


@pytest.mark.parametrize(("runner_counts", "kept"), [(False, BLOCK), (True, 0)], ids=["V1", "V2"])
def test_one_request_of_attention_alone_keeps_what_precedes_unless_the_runner_counts_its_tokens(runner_counts, kept):
    scheduler, _ = started(0, False)
    scheduler.use_v2_model_runner = runner_counts
    step(scheduler, block_of(scheduler, "other", 1))
    assert scheduler.requests["other"].num_computed_tokens == kept
    assert [request.request_id for request in scheduler.waiting] == (["other"] if runner_counts else [])
