# SPDX-License-Identifier: Apache-2.0
"""Where the patched scheduler ends the chunks of a prefill: patch 0009, on the scheduler lab."""

from itertools import pairwise

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from devtools.scheduler_lab import LabSettings, make_request, make_scheduler, runner_output, sampled_tokens

pytestmark = pytest.mark.patches

DECODE = 200
"""Tokens of a request that decodes all the time."""
Step = dict[str, int]


def step(scheduler: Scheduler) -> Step:
    """Tokens of each request that is scheduled."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, runner_output(sampled_tokens(scheduler, output)))
    return dict(output.num_scheduled_tokens)


def steps_of(settings: LabSettings, prompts: list[int], *, num_decodes: int = 0, threshold: int = 0) -> list[Step]:
    """What each step gives to the prompts ("0", "1", ...) beside some decodes, until all have their first token."""
    scheduler = make_scheduler(settings)
    scheduler.scheduler_config.long_prefill_token_threshold = threshold
    for number in range(num_decodes):
        scheduler.add_request(make_request(f"decode {number}", [900 + number] * 10, DECODE, settings))
    if num_decodes:
        step(scheduler)
    waiting = {str(number): length for number, length in enumerate(prompts)}
    for name, length in waiting.items():
        scheduler.add_request(make_request(name, [int(name)] * length, 1, settings))
    done = []
    while any(waiting.values()):
        assert len(done) < DECODE - 10, f"prefills wait for the decodes: {waiting}"
        done.append({name: num for name, num in step(scheduler).items() if name in waiting})
        for name, num in done[-1].items():
            waiting[name] -= num
    return done


def ends_of(name: str, steps: list[Step]) -> list[int]:
    """Where the request's chunks end, but for the last."""
    total, ends = 0, []
    for given in steps:
        if name in given:
            total += given[name]
            ends.append(total)
    return ends[:-1]


@pytest.mark.parametrize("num_decodes", [1, 3, 40])
@pytest.mark.parametrize("match_unit", [None, 64])
@pytest.mark.parametrize(
    ("budget", "threshold"), [(1152, 0), (1153, 0), (1000, 0), (1152, 512), (4096, 512), (1152, 1151)]
)
def test_a_prefill_and_what_is_behind_it_start_beside_decodes(budget, threshold, match_unit, num_decodes):
    settings = LabSettings(block_size=1152, match_unit=match_unit, budget=budget)
    steps = steps_of(settings, [3000, 50], num_decodes=num_decodes, threshold=threshold)
    first = [next(number for number, given in enumerate(steps, 1) if name in given) for name in ("0", "1")]
    assert max(first) <= 3
    assert all("0" in given for given in steps[: len(ends_of("0", steps)) + 1])  # and then it never pauses


@pytest.mark.parametrize("block_size", [1056, 544])
def test_prompts_take_as_few_steps_as_without_the_patch(block_size):
    """Eight prompts of 6000 tokens: a chunk inside a block would cost the request a step that it could use whole."""
    assert len(steps_of(LabSettings(block_size=block_size, budget=8192), [6000] * 8)) == 7


@pytest.mark.parametrize(
    ("block_size", "match_unit", "grid"),
    [(1152, None, 64), (1056, None, 64), (1152, 64, 64), (1056, 48, 48), (544, 32, 32)],
)
@pytest.mark.parametrize("budget", [1152, 2048, 4096])
def test_chunks_end_on_the_grid_and_leave_no_sliver(block_size, match_unit, grid, budget):
    settings = LabSettings(block_size=block_size, match_unit=match_unit, budget=budget)
    prompts = [3000, 50, 5000, 9000, 700, 4000]
    steps = steps_of(settings, prompts, num_decodes=3)
    for number in range(len(prompts)):
        ends = ends_of(str(number), steps)
        assert [end for end in ends if end % block_size % grid] == []
        assert all(later - end >= min(grid, block_size % 64 or 64) for end, later in pairwise(ends))


def test_a_prefill_behind_another_waits_for_a_whole_block():
    settings = LabSettings(block_size=1152, match_unit=64, budget=2303)
    first, second = steps_of(settings, [3000, 3000], num_decodes=1)[:2]
    assert (first, second) == ({"0": 1152}, {"0": 1152})
    settings = LabSettings(block_size=1152, match_unit=64, budget=2305)
    assert steps_of(settings, [3000, 3000], num_decodes=1)[0] == {"0": 2304}


def test_a_short_prompt_uses_what_is_left_behind_another_prefill():
    settings = LabSettings(block_size=1152, budget=2303)
    assert steps_of(settings, [3000, 900], num_decodes=1)[0] == {"0": 1152, "1": 900}


@pytest.mark.parametrize("match_unit", [None, 48])
def test_where_no_step_fits_a_block_all_prefills_go_inside(match_unit):
    """As without the patch."""
    settings = LabSettings(block_size=2064, match_unit=match_unit, budget=2048)
    second = steps_of(settings, [3000, 3000], num_decodes=1)[1]
    assert min(second["0"], second["1"]) > 0


@pytest.mark.parametrize(("budget", "match_unit", "threshold"), [(512, 576, 0), (70, 128, 0), (8192, 64, 32)])
def test_a_match_unit_wider_than_a_step_does_not_stop_a_prefill(budget, match_unit, threshold):
    settings = LabSettings(block_size=1152, match_unit=match_unit, budget=budget)
    steps = steps_of(settings, [3000, 50], num_decodes=1, threshold=threshold)
    assert all("0" in given for given in steps[: len(ends_of("0", steps)) + 1])
