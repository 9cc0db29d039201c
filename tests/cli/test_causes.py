# SPDX-License-Identifier: Apache-2.0
"""Each cause of restoring nothing has its sentence. tests/http/test_cleaner.py has the usual ones of a real server."""

from collections.abc import Sequence

import pytest

from vllm_overlay.cli.causes import cause
from vllm_overlay.server.api_client import Metrics
from vllm_overlay.server.interval import Interval

SCRAPE = """\
vllm:hybrid_offload_queried_tokens_total{connector="disk",engine="0"} 1828.0
vllm:hybrid_offload_lost_tokens_total{connector="disk",engine="0",group_kind="full",reason="attention"} 1152.0
vllm:hybrid_offload_lost_tokens_total{connector="disk",engine="0",group_kind="",reason="none"} 576.0
vllm:hybrid_offload_lost_tokens_total{connector="disk",engine="0",group_kind="",reason="prompt_end"} 100.0
vllm:hybrid_offload_restored_tokens_total{connector="disk",engine="0"} 0.0
vllm:hybrid_offload_stored_objects_total{connector="disk",engine="0"} 2.0
vllm:hybrid_offload_objects{connector="disk",engine="0"} 2.0
vllm:hybrid_offload_capacity_bytes{connector="disk",engine="0"} 4.294967296e+09
vllm:hybrid_offload_state_bytes{connector="disk",engine="0"} 804864.0
vllm:hybrid_offload_restore_unit_tokens{connector="disk",engine="0"} 1152.0
vllm:hybrid_offload_block_tokens{connector="disk",engine="0"} 1152.0
vllm:hybrid_offload_loads_paused{connector="disk",engine="0"} 0.0
vllm:prefix_cache_hits_total{engine="0"} 0.0
vllm:prompt_tokens_total{engine="0"} 1828.0
vllm:cache_config_info{block_size="1152",enable_prefix_caching="True",engine="0",mamba_cache_mode="align"} 1.0
"""
"""A real server's, as far as it is read here: a prompt of half a block, and one of a block and 100 tokens."""

OURS = "vllm:hybrid_offload_"
DISK = '{connector="disk"}'
NOTHING_THERE = {f"{OURS}stored_objects_total": 0, f"{OURS}objects": 0}
NOT_ASKED = {f"{OURS}queried_tokens_total": 0}
IN_THE_DEVICE = {"vllm:prefix_cache_hits_total": 640}


def lost(reason: str, tokens: int = 5000) -> dict[str, float]:
    return {f'{OURS}lost_tokens_total{{reason="{reason}"}}': tokens}


def dropped(reason: str) -> dict[str, float]:
    return {**NOTHING_THERE, f'{OURS}dropped_stores_total{{reason="{reason}"}}': 3}


def failed(reason: str) -> dict[str, float]:
    return {f'{OURS}failed_loads_total{{reason="{reason}"}}': 3}


def scraped(changes: dict[str, float], lines: Sequence[str] = SCRAPE.splitlines()) -> Interval:
    """A scrape with other values, or more series."""
    names = {name.partition("{")[0] for name in changes if "{" not in name}
    kept = [line for line in lines if line.partition("{")[0] not in names]
    more = [f"{name if '{' in name else name + DISK} {value}" for name, value in changes.items()]
    return Interval(None, Metrics("\n".join([*kept, *more]) + "\n"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{OURS}restored_tokens_total": 64}, None),
        ({}, "no prompt has come a second time"),
        ({'vllm:cache_config_info{enable_prefix_caching="False"}': 1, **NOT_ASKED}, "set --enable-prefix-caching"),
        ({'vllm:kv_connector_state{connector="disk"}': 2}, "connector disk is out of service: the server's log"),
        ({f"{OURS}loads_paused": 1}, "loads are paused: look at the kernel's log"),
        ({**NOT_ASKED, "vllm:prompt_tokens_total": 0}, "no request has come"),
        ({**NOT_ASKED, **IN_THE_DEVICE}, "still in vLLM's own cache (640 tokens)"),
        (NOT_ASKED, "no request has been counted"),
        ({**NOTHING_THERE, f"{OURS}capacity_bytes": 0}, "tier disk can store nothing where it is"),
        (dropped("no_room"), "nothing was stored (dropped for no_room); no store found room: raise capacity_bytes"),
        (dropped("staging_full"), "raise staging_bytes or write_threads"),
        (dropped("transfer_full"), "raise device_buffer_bytes"),
        (dropped("io_error"), "the disk tier cannot write"),
        (dropped("adapter"), "give all of them the same files"),
        (dropped("of a later version"), "the server's log has the error"),
        (NOTHING_THERE, "the switch store of a child off, or store_on_nth_use above 1"),
        ({**NOTHING_THERE, **lost("none")}, "the prompts are shorter than 1152 tokens"),
        (failed("missing"), "files of the disk tier were removed: keep cleaners away from its root"),
        (failed("timeout"), "loads took longer than load_timeout_s"),
        (failed("checksum"), "loads failed (checksum); the server's log names each request"),
        (lost("none"), "shorter than 1152 tokens, where the first restore point is: set --prefix-match-unit 64"),
        ({**lost("none"), f"{OURS}restore_unit_tokens": 64}, "shorter than 64 tokens, where the first restore"),
        ({**lost("none"), f"{OURS}state_bytes": 0}, "nothing of them can be restored"),
        (lost("granularity"), "restore points lie 1152 tokens apart: set a finer --prefix-match-unit"),
        (lost("drafter"), "because the drafter reads ahead: set a finer --prefix-match-unit"),
        ({**lost("prompt_end"), **IN_THE_DEVICE}, "still in vLLM's own cache (640 tokens)"),
        (IN_THE_DEVICE, "still in vLLM's own cache (640 tokens)"),
        (lost("evicted"), "the tiers are too small, what came again had been evicted: raise capacity_bytes"),
        (lost("evicted", 64), "the tiers are too small"),
        (lost("window"), "no prompt has come a second time"),
        ({**lost("window"), f"{OURS}evicted_objects_total": 1}, "the tiers are too small"),
        (lost("state"), "set speculative_snapshot_tokens"),
        (lost("adapter"), "load it ahead by --lora-modules"),
        (lost("not_taken"), "requests with prompt_logprobs read no cache"),
        (
            {**lost("not_taken"), 'vllm:kv_connector_chosen_total{connector="other"}': 3},
            "other connectors loaded what the tiers offered",
        ),
        (
            {**lost("not_taken"), 'vllm:kv_connector_outbid_total{connector="disk"}': 3},
            "requests with prompt_logprobs read no cache",
        ),
        ({**lost("not_taken"), **IN_THE_DEVICE}, "still in vLLM's own cache (640 tokens)"),
        ({**lost("not_taken"), 'vllm:kv_connector_too_slow_total{connector="disk"}': 3}, "(load_weight auto)"),
        (
            {**lost("not_taken"), 'vllm:kv_connector_ignored_offers_total{connector="disk",reason="min_tokens"}': 3},
            "a setting leaves out what tiers offer (min_tokens)",
        ),
        (lost("of a later version"), "no prompt has come a second time"),
    ],
)  # fmt: skip
def test_each_cause_has_its_sentence(changes: dict[str, float], words: str | None) -> None:
    found = cause(scraped(changes))
    assert bool(found) == (words is not None)
    assert words is None or words in found, found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm:external_prefix_cache_hits_total": 640}, None),
        ({}, "no prompt has come a second time"),
        (IN_THE_DEVICE, "still in vLLM's own cache (640 tokens)"),
        ({**dropped("io_error"), **IN_THE_DEVICE}, "the disk tier cannot write"),
        ({"vllm:prompt_tokens_total": 0}, "no request has come"),
    ],
)
def test_below_vllms_own_connector_vllm_counts_what_was_restored(changes: dict[str, float], words: str | None) -> None:
    """A secondary tier knows of objects and bytes alone."""
    without = {f"{OURS}{name}_total" for name in ("queried_tokens", "restored_tokens", "lost_tokens")}
    lines = [line for line in SCRAPE.splitlines() if line.partition("{")[0] not in without]
    found = cause(scraped(changes, lines))
    assert bool(found) == (words is not None)
    assert words is None or words in found, found


def test_a_quiet_interval_says_that_no_request_has_come() -> None:
    """As --watch sees it."""
    assert cause(Interval(Metrics(SCRAPE), Metrics(SCRAPE))) == "no request has come"
