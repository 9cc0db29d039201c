# SPDX-License-Identifier: Apache-2.0
"""Names with a drafter that reads ahead: they cover one match unit more than their objects, here of 16 tokens."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.harness import HYBRID, Harness
from vllm_overlay.connector.lookahead import LookaheadKeys, lookahead_units
from vllm_overlay.connector.lora.metadata import AdapterWeights
from vllm_overlay.planner.objects import SNAPSHOT_TAG


def test_keys_are_those_further_on_and_grow_with_the_request() -> None:
    hashes = [b"a"]
    keys = LookaheadKeys(hashes, 1)
    assert (list(keys), len(LookaheadKeys(hashes, 2))) == ([], 0)
    with pytest.raises(IndexError):
        keys[0]
    hashes += [b"b", b"c", b"d"]
    assert list(keys) == keys[:] == [b"b", b"c", b"d"]
    assert (keys[0], keys[-1], keys[1:], keys[:-1]) == (b"b", b"d", [b"c", b"d"], [b"b", b"c"])


@pytest.mark.parametrize(
    ("drops", "tokens", "units"), [(None, 0, 0), (False, 1, 0), (True, 1, 1), (True, 64, 1), (True, 65, 2)]
)
def test_units_are_those_that_vllm_drops(drops: bool | None, tokens: int, units: int) -> None:
    speculative = None if drops is None else SimpleNamespace(use_eagle_block_drop=lambda: drops)
    config: Any = SimpleNamespace(speculative_config=speculative, num_prefill_lookahead_tokens=tokens)
    assert lookahead_units(config, 64) == units


def parted(harness: Harness, at: int, adapter_id: int = 0) -> int | None:
    """What a prompt finds that is "p"'s up to there, and has other tokens behind."""
    request = harness.request("p", 200, adapter_id)
    request.request_id = "sibling"
    request.block_hashes = request.block_hashes[: at // 16] + harness.request("q", 200).block_hashes[at // 16 :]
    return harness.scheduler.lookup(request, 0)


@pytest.mark.parametrize(("units", "found"), [(0, [128, 128, 64]), (1, [64, 128, 64])])
def test_prompts_that_part_at_a_restore_point_share_what_lies_before_it_without_a_drafter_alone(
    units: int, found: list[int]
) -> None:
    harness = Harness(lookahead_units=units)
    harness.store("p", 144)
    assert [parted(harness, at) for at in (128, 144, 112)] == found


def test_keys_of_adapters_are_as_far_ahead() -> None:
    harness = Harness(lookahead_units=1)
    weights = AdapterWeights(1, b"1" * 32)
    harness.idle_step(weights)
    request = harness.looked_up("p", adapter_id=1)
    harness.step(request, 144, weights)
    assert [parted(harness, at, adapter_id=1) for at in (128, 144)] == [64, 128]
    assert parted(harness, 200) == 0


@pytest.mark.parametrize(("num_tokens", "offered"), [(200, 176), (192, 176), (191, 160), (193, 176)])
def test_the_last_state_that_vllm_offers_is_stored_and_restored(num_tokens: int, offered: int) -> None:
    """``floor(length / unit) * unit - unit``, and nothing above it."""
    harness = Harness(geometry=HYBRID, lookahead_units=1)
    for boundary, is_stored in ((offered + 16, False), (offered, True)):
        request = harness.looked_up(f"p{boundary}", num_tokens)
        jobs = harness.plan(request, num_tokens, states_at=boundary)
        harness.report(jobs)
        assert any(job.ticket.planned.object_id.tag == SNAPSHOT_TAG for job in jobs) is is_stored
        assert harness.found(f"p{boundary}", num_tokens=num_tokens) == (offered if is_stored else 0)
