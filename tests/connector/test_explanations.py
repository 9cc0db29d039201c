# SPDX-License-Identifier: Apache-2.0
"""Why a request was not restored: the log names the request, the tokens and the reason."""

import logging
from collections.abc import Iterator

import pytest

from tests.connector.harness import HYBRID, NOTHING, Harness
from vllm_overlay.connector import explanations
from vllm_overlay.connector.metadata import OffloadWorkerMetadata
from vllm_overlay.planner.geometry import Geometry, Group, GroupKind
from vllm_overlay.tiers.cpu import CpuTierManager


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is said at info."""
    found: list[str] = []
    monkeypatch.setattr(explanations.logger, "info", lambda message, *args: found.append(message % args))
    yield found


def evicting(log_lost_tokens: int) -> Harness:
    """A tier with room for two chunks that had all of the prompt "p"."""
    made = Harness(CpuTierManager(num_units=2, unit_bytes=512, world_size=2), log_lost_tokens=log_lost_tokens)
    made.store("p")
    made.store("q")
    return made


def test_what_was_evicted_is_named_once_it_is_computed(lines: list[str]) -> None:
    made = evicting(128)
    request = made.looked_up("p")
    made.scheduler.lookup(request, 0)  # asked again for want of blocks
    assert lines == []
    made.step(request, 140)
    made.step(request, 60)
    assert lines == ["test: request p computes tokens that were stored once: evicted 128 (group 0)"]


@pytest.mark.parametrize("log_lost_tokens", [0, 129])
def test_fewer_tokens_than_asked_for_are_not_named(lines: list[str], log_lost_tokens: int) -> None:
    made = evicting(log_lost_tokens)
    request = made.looked_up("p")
    made.step(request, 140)
    assert lines == []


def test_what_another_connector_has_loaded_is_not_computed(lines: list[str]) -> None:
    made = evicting(64)
    request = made.looked_up("p")
    request.num_computed_tokens = 64
    made.step(request, 76)
    assert lines == ["test: request p computes tokens that were stored once: evicted 64 (group 0)"]
    made.scheduler.finished("p")
    request = made.looked_up("p")
    request.num_computed_tokens = 128
    made.step(request, 12)
    assert len(lines) == 1


def test_a_missing_state_is_named(lines: list[str]) -> None:
    made = Harness(geometry=HYBRID, log_lost_tokens=128)
    made.store("p")  # attention alone: vLLM kept no state at a boundary
    request = made.looked_up("p")
    made.step(request, 140)
    assert lines == ["test: request p computes tokens that were stored once: state 128"]


@pytest.mark.parametrize("kind", [GroupKind.WINDOW, GroupKind.RECURRENT])
def test_without_full_attention_nobody_knows_what_was_stored_once(lines: list[str], kind: GroupKind) -> None:
    group = Group(0, kind, 64, 8, 512, kind is GroupKind.WINDOW, window=128)
    made = Harness(geometry=Geometry.build([group], 16, 64), log_lost_tokens=1)
    made.step(made.looked_up("never seen"), 140)
    assert lines == []


def test_a_request_that_ends_before_its_first_step_is_not_named(lines: list[str]) -> None:
    made = evicting(1)
    made.looked_up("p")
    made.scheduler.finished("p")
    made.step(made.request("p"), 140)
    assert lines == []


def test_each_lookup_has_a_line_at_debug_level(caplog: pytest.LogCaptureFixture) -> None:
    made = Harness()
    made.store("p")
    with caplog.at_level(logging.DEBUG, explanations.logger.name):
        assert made.found("p") == 128
    assert caplog.messages == [
        "test: request another p: 0 of 200 tokens on the device, 128 more to restore; then attention (group 0); "
        "not restored: prompt_end 8, attention 64"
    ]


def test_a_lookup_that_does_not_ask_the_tier_has_its_line_and_replaces_an_earlier_answer(
    caplog: pytest.LogCaptureFixture, lines: list[str]
) -> None:
    made = evicting(128)
    request = made.looked_up("p")
    made.scheduler.update(NOTHING, OffloadWorkerMetadata(load_pause_s=60.0))
    with caplog.at_level(logging.DEBUG, explanations.logger.name):
        made.scheduler.lookup(request, 16)
    assert caplog.messages == ["test: request p: 16 of 200 tokens on the device, the tier is not asked: breaker"]
    made.step(request, 140)
    assert lines == []
