# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a request are stored: its prompt, and what decode steps wrote only where that was asked for."""

from typing import Any, Literal

import pytest

from tests.connector.harness import GEOMETRY, HYBRID, Harness
from vllm_overlay.connector.metadata import StoreJob
from vllm_overlay.planner.geometry import Geometry

PROMPT, ALL = 140, 200
"""Two chunks of 64 are the prompt's; the third holds its last tokens and the first of the answer."""


def a_request(made: Harness) -> Any:
    """It has the hashes of its answer already."""
    request = made.request("p", ALL)
    request.num_prompt_tokens = request.num_tokens = PROMPT
    made.scheduler.lookup(request, 0)
    return request


def decoded(made: Harness, states_at: int = 0) -> tuple[tuple[StoreJob, ...], tuple[StoreJob, ...]]:
    """The stores of a prompt's prefill, and of the decode steps after it."""
    request = a_request(made)
    of_prompt = made.jobs_of_step(request, PROMPT)
    request.num_tokens = ALL
    return of_prompt, made.plan(request, ALL - PROMPT, states_at=states_at)


@pytest.mark.parametrize(
    ("geometry", "setting", "num_decoded"),
    [(GEOMETRY, "auto", 1), (HYBRID, "auto", 0), (GEOMETRY, False, 0), (HYBRID, True, 1)],
    ids=["attention", "states", "attention, off", "states, on"],
)
def test_chunks_that_decode_steps_wrote_are_stored_as_the_setting_says(
    geometry: Geometry, setting: bool | Literal["auto"], num_decoded: int
) -> None:
    of_prompt, of_answer = decoded(Harness(geometry=geometry, store_decoded_tokens=setting))
    assert (len(of_prompt), len(of_answer)) == (2, num_decoded)


@pytest.mark.parametrize(("setting", "num_stored"), [("auto", 0), (True, 1)])
def test_states_that_decode_steps_went_through_are_stored_as_the_setting_says(
    setting: bool | Literal["auto"], num_stored: int
) -> None:
    """With a retention interval vLLM offers them too."""
    _, of_answer = decoded(Harness(geometry=HYBRID, store_decoded_tokens=setting), states_at=192)
    assert sum(bool(job.placement.pages) for job in of_answer) == num_stored


def test_a_state_of_the_prompt_is_stored_though_it_is_offered_a_step_later() -> None:
    _, of_answer = decoded(Harness(geometry=HYBRID), states_at=128)
    assert [bool(job.placement.pages) for job in of_answer] == [True]


def test_the_next_turn_stores_the_answer_that_it_prefills() -> None:
    made = Harness(geometry=HYBRID)
    decoded(made)
    made.scheduler.finished("p")
    request = made.request("p", ALL)
    request.request_id = "next turn"
    made.scheduler.lookup(request, 0)
    assert made.step(request, ALL) == 1


def test_chunks_of_the_prompt_that_failed_are_stored_again_during_the_answer() -> None:
    made = Harness(geometry=HYBRID)
    request = a_request(made)
    jobs = made.plan(request, PROMPT)
    made.report(jobs, failed=jobs)
    request.num_tokens = ALL
    assert [made.step(request, 1) for _ in range(3)] == [1, 1, 0]


def test_what_a_streaming_session_decoded_stays_decoded_when_it_becomes_its_prompt() -> None:
    made = Harness(geometry=HYBRID)
    request = a_request(made)
    made.step(request, PROMPT)
    request.num_prompt_tokens = request.num_tokens = ALL
    assert made.step(request, ALL - PROMPT) == 0
