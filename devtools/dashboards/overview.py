# SPDX-License-Identifier: Apache-2.0
"""The dashboard *Overview*: is the cache worth its memory, and is anything broken?"""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from devtools.dashboards.frame import framed
from devtools.dashboards.panels import FULL_WIDTH, RED, Chart, Number, Panel, Query
from devtools.dashboards.promql import (
    CHILD,
    ENGINE,
    TIER,
    WHOLE_RANGE,
    average,
    child_or_tier,
    increase,
    largest,
    mean,
    quantile,
    rate,
    ratio,
    selected,
)

PROMPT_TOKENS = "vllm:prompt_tokens_by_source"
FIRST_TOKEN = f"{TIER}first_token_seconds"
RESTORED = child_or_tier("loaded_tokens", "restored_tokens")
ASKED = child_or_tier("asked_tokens", "queried_tokens")
NOT_VERIFIED = "checksum|header|size|owner"
"""Values of ``reason``: the file was read, and is not what was stored."""

NOT_COMPUTED = Number(
    "Prompt tokens not computed",
    "Share of all prompt tokens in the time range that came from vLLM's own KV cache or from a connector.",
    "percentunit",
    ratio(
        increase(PROMPT_TOKENS, (), WHOLE_RANGE, source="local_cache_hit|external_kv_transfer"),
        increase(PROMPT_TOKENS, (), WHOLE_RANGE),
    ),
    {},
)
TOKENS_RESTORED = Number(
    "Tokens restored",
    "Prompt tokens that connectors loaded in the time range.",
    "short",
    child_or_tier("loaded_tokens", "restored_tokens", (), whole_range=True),
    {},
)
OUT_OF_SERVICE = Number(
    "Connectors out of service",
    "Children of a MultiConnector that do not serve, and tiers that have paused their loads. "
    "Requests are computed meanwhile; Internals shows who and since when.",
    "short",
    f"(sum({selected(f'{CHILD}state')} > bool 0) or vector(0)) + (sum({selected(f'{TIER}loads_paused')}) or vector(0))",
    {1: RED},
)
LOADS_NOT_VERIFIED = Number(
    "Loads that did not verify",
    "Loads in the time range that failed because a file is not what was stored. Each was computed instead.",
    "short",
    increase(f"{TIER}failed_loads", (), WHOLE_RANGE, reason=NOT_VERIFIED),
    {1: RED},
)
HIT_RATE = Chart(
    "Hit rate",
    "Of the prompt tokens that were not in vLLM's own KV cache: the share that this connector loaded. "
    "Shares of several connectors add up, because one request is loaded by one of them.",
    "percentunit",
    (Query(ratio(RESTORED, ASKED), "{{connector}}"),),
    top=1,
)
OFFERED = Chart(
    "What connectors had",
    "The share that this child of a MultiConnector offered, whether it was chosen or not. "
    "Above its hit rate: another child was chosen, or computing was faster.",
    "percentunit",
    (Query(ratio(rate(f"{CHILD}offered_tokens"), rate(f"{CHILD}asked_tokens")), "{{connector}}"),),
    top=1,
)
SOURCES = Chart(
    "Where prompt tokens come from",
    "Prompt tokens a second: computed, found in vLLM's own KV cache, or loaded by a connector.",
    "short",
    (
        Query(rate(PROMPT_TOKENS, (), source="local_compute"), "computed"),
        Query(rate(PROMPT_TOKENS, (), source="local_cache_hit"), "device cache"),
        Query(RESTORED, "{{connector}}"),
    ),
    stacked=True,
    width=FULL_WIDTH,
)
MEAN_FIRST_TOKEN = Chart(
    "Mean time to first token: hit against miss",
    "A line for prompts that mostly came from a connector, from vLLM's own KV cache, or were mostly computed. "
    "Longer prompts take longer: compare at like prompt lengths.",
    "s",
    (
        Query(mean(FIRST_TOKEN, source="tier"), "loaded by {{connector}}"),
        Query(average(mean(FIRST_TOKEN, source="device")), "device cache"),
        Query(average(mean(FIRST_TOKEN, source="computed")), "computed"),
    ),
)
SLOW_FIRST_TOKEN = Chart(
    "Time to first token, 95 of 100 requests",
    "Below this 95 of 100 requests had their first token, by where most of the prompt came from.",
    "s",
    (
        Query(quantile(0.95, FIRST_TOKEN, source="tier"), "loaded by {{connector}}"),
        Query(average(quantile(0.95, FIRST_TOKEN, source="device")), "device cache"),
        Query(average(quantile(0.95, FIRST_TOKEN, source="computed")), "computed"),
    ),
)
BYTES = Chart(
    "Bytes in tiers",
    "What each tier holds, and its limit as a dashed line. A full tier evicts what was used least recently; "
    "that is how it should be.",
    "bytes",
    (
        Query(largest(f"{TIER}used_bytes", ENGINE), "{{connector}} of {{instance}}, engine {{engine}}"),
        Query(
            largest(f"{TIER}capacity_bytes", ENGINE),
            "limit: {{connector}} of {{instance}}, engine {{engine}}",
            dashed=True,
        ),
    ),
)
FULL = Chart(
    "Tiers: how full",
    "Bytes held as a share of the limit.",
    "percentunit",
    (
        Query(
            ratio(largest(f"{TIER}used_bytes", ENGINE), largest(f"{TIER}capacity_bytes", ENGINE)),
            "{{connector}} of {{instance}}, engine {{engine}}",
        ),
    ),
    top=1,
)

ROWS: dict[str, tuple[Panel, ...]] = {
    "In this time range": (NOT_COMPUTED, TOKENS_RESTORED, OUT_OF_SERVICE, LOADS_NOT_VERIFIED),
    "Hits": (HIT_RATE, OFFERED, SOURCES),
    "What a hit is worth": (MEAN_FIRST_TOKEN, SLOW_FIRST_TOKEN),
    "Tiers": (BYTES, FULL),
}


def overview() -> Dashboard:
    """The SDK's builder of *Overview*."""
    return framed(
        "vllm-overlay-overview",
        "vLLM overlay: Overview",
        "Hit rates by connector, tokens restored, time to first token with a hit and without, and bytes in tiers.",
        ROWS,
    )
