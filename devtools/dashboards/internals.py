# SPDX-License-Identifier: Apache-2.0
"""The dashboard *Internals*: why was it not a hit, what is slow, what fails?"""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from devtools.dashboards.frame import framed
from devtools.dashboards.panels import FULL_WIDTH, GREEN, HALF, RED, YELLOW, Chart, Panel, Query, States
from devtools.dashboards.promql import CHILD, ENGINE, TIER, increase, largest, mean, quantile, rate, ratio, total

WHOSE = "{{connector}}"
OF_ENGINE = "{{connector}} of {{instance}}, engine {{engine}}"
BY_REASON = ("connector", "reason")
BY_HOOK = ("connector", "hook")
PHASES = {0: ("serving", GREEN), 1: ("stopping", YELLOW), 2: ("out of service", RED), 3: ("coming back", YELLOW)}
"""By the value of the gauge ``state``."""
OUT = 2
LOST_BY_KIND = (
    f"label_replace({rate(f'{TIER}lost_tokens', ('connector', 'group_kind'))}, "
    '"group_kind", "no group", "group_kind", "^$")'
)
"""Prometheus has no empty labels, and a legend should name the tokens that no group has lost."""


def latencies(title: str, description: str, histogram: str) -> Chart:
    """The mean and the slow end of a histogram of seconds."""
    return Chart(
        title,
        description,
        "s",
        (
            Query(mean(histogram), f"{WHOSE}, mean"),
            Query(quantile(0.95, histogram), f"{WHOSE}, 95 of 100"),
        ),
    )


MISSES = (
    Chart(
        "Lost tokens, by reason",
        "Prompt tokens a second beyond vLLM's own KV cache that a tier did not restore, by why. "
        "attention: not stored yet, or evicted. state: no snapshot is as far as attention. docs/metrics.md has all.",
        "short",
        (Query(rate(f"{TIER}lost_tokens", BY_REASON), f"{WHOSE}: {{{{reason}}}}"),),
        stacked=True,
    ),
    Chart(
        "Lost tokens, by kind of group",
        "The same, by the kind of KV cache group that ended the hit: full attention, recurrent or sliding window.",
        "short",
        (Query(LOST_BY_KIND, f"{WHOSE}: {{{{group_kind}}}}"),),
        stacked=True,
    ),
    Chart(
        "What limited lookups",
        "Lookups a second, by what kept their restore point from being higher.",
        "ops",
        (Query(rate(f"{TIER}lookup_limits", BY_REASON), f"{WHOSE}: {{{{reason}}}}"),),
        stacked=True,
        width=FULL_WIDTH,
    ),
)
SELECTION = (
    Chart(
        "What became of offers",
        "Requests a second: whose offer was chosen, whose was outbid, and where computing was expected to be faster. "
        "Trials are of the chosen ones.",
        "ops",
        (
            Query(rate(f"{CHILD}chosen"), f"{WHOSE}: chosen"),
            Query(rate(f"{CHILD}outbid"), f"{WHOSE}: outbid"),
            Query(rate(f"{CHILD}too_slow"), f"{WHOSE}: computing is faster"),
            Query(rate(f"{CHILD}trials"), f"{WHOSE}: trial"),
            Query(rate(f"{CHILD}ignored_offers"), f"{WHOSE}: ignored by its settings"),
        ),
    ),
    Chart(
        "Load weights",
        "What an offered token of this child counts in the choice: 1 is free, 0 is no faster than computing.",
        "short",
        (Query(largest(f"{CHILD}load_weight", ENGINE), OF_ENGINE),),
    ),
)
TIMES = (
    latencies("Loads", "Seconds from the allocation of a request's blocks until it is loaded.", f"{TIER}load_seconds"),
    latencies("Stores", "Seconds until a rank has kept one chunk or snapshot.", f"{TIER}store_seconds"),
    latencies(
        "Lookups",
        "Seconds of one lookup in a tier, on the scheduler's thread. It delays every request.",
        f"{TIER}lookup_seconds",
    ),
    Chart(
        "Time in hooks",
        "Seconds a second that vLLM spends in this child's hooks, of all its processes.",
        "percentunit",
        (Query(rate(f"{CHILD}hook_seconds"), WHOSE),),
    ),
    Chart(
        "Bytes loaded and stored",
        "Bytes a second of all ranks.",
        "Bps",
        (
            Query(rate(f"{TIER}loaded_bytes"), f"{WHOSE}: loaded"),
            Query(rate(f"{TIER}stored_bytes"), f"{WHOSE}: stored"),
        ),
    ),
    Chart(
        "Bandwidth of a load",
        "Bytes loaded for each second that a load was under way. Loads that run at once each count.",
        "Bps",
        (Query(ratio(rate(f"{TIER}loaded_bytes"), total(f"{TIER}load_seconds")), WHOSE),),
    ),
)
STORES = (
    Chart(
        "Objects stored and evicted",
        "Chunks and snapshots a second. A full tier evicts as much as it stores; each rank counts what it stores.",
        "ops",
        (
            Query(rate(f"{TIER}stored_objects"), f"{WHOSE}: stored"),
            Query(rate(f"{TIER}evicted_objects"), f"{WHOSE}: evicted"),
        ),
    ),
    Chart(
        "Waiting",
        "Stores and loads that were begun and have not been reported.",
        "short",
        (
            Query(largest(f"{TIER}pending_stores", ENGINE), f"{OF_ENGINE}: stores"),
            Query(largest(f"{TIER}pending_loads", ENGINE), f"{OF_ENGINE}: loads"),
        ),
    ),
)
FAULTS = (
    States(
        "Who serves",
        "Each child's circuit breaker, and each tier's own for its loads. Nothing is asked of one that is out.",
        (
            Query(largest(f"{CHILD}state", ENGINE), OF_ENGINE),
            Query(
                f"{largest(f'{TIER}loads_paused', ENGINE)} * {OUT}",
                f"loads of {OF_ENGINE}",
            ),
        ),
        PHASES,
    ),
    Chart(
        "Failed loads",
        "Loads that failed, by reason; their requests were computed. Without a reason: the MultiConnector's count.",
        "short",
        (
            Query(increase(f"{TIER}failed_loads", BY_REASON), f"{WHOSE}: {{{{reason}}}}"),
            Query(increase(f"{CHILD}failed_loads"), f"{WHOSE}"),
        ),
        bars=True,
    ),
    Chart(
        "Dropped stores",
        "Chunks and snapshots that were given up, by reason. Each can only cost a later miss.",
        "short",
        (Query(increase(f"{TIER}dropped_stores", BY_REASON), f"{WHOSE}: {{{{reason}}}}"),),
        bars=True,
    ),
    Chart(
        "Errors",
        "Exceptions that a child raised, by hook, and unexpected errors in a tier's own hooks.",
        "short",
        (
            Query(increase(f"{CHILD}errors", BY_HOOK), f"{WHOSE}: {{{{hook}}}}"),
            Query(
                f"{increase(f'{TIER}hook_errors')} or {largest(f'{TIER}objects')} * 0",
                f"{WHOSE}: in a hook of the tier",
            ),
        ),
        bars=True,
    ),
    Chart(
        "Isolations",
        "How often a child left service and came back, and hooks that took longer than hang_after_s.",
        "short",
        (
            Query(increase(f"{CHILD}isolations"), f"{WHOSE}: left service"),
            Query(increase(f"{CHILD}returns"), f"{WHOSE}: came back"),
            Query(increase(f"{CHILD}hangs"), f"{WHOSE}: hung"),
        ),
        bars=True,
    ),
    Chart(
        "Wrong answers",
        "Lookups that were answered with something impossible, and completions that were reported twice.",
        "short",
        (
            Query(increase(f"{CHILD}invalid_answers"), f"{WHOSE}: lookup"),
            Query(increase(f"{CHILD}ignored_reports"), f"{WHOSE}: completion"),
        ),
        bars=True,
    ),
    Chart(
        "Requests in quarantine",
        "Their blocks are held, because a connector that is out of service may still touch them.",
        "short",
        (Query(largest(f"{CHILD}quarantined_requests", ENGINE), OF_ENGINE),),
        width=HALF,
    ),
)

ROWS: dict[str, tuple[Panel, ...]] = {
    "Why it was not a hit": MISSES,
    "Which connector was chosen": SELECTION,
    "How long it takes": TIMES,
    "Stores and evictions": STORES,
    "Faults": FAULTS,
}


def internals() -> Dashboard:
    """The SDK's builder of *Internals*."""
    return framed(
        "vllm-overlay-internals",
        "vLLM overlay: Internals",
        "Lost tokens by reason and group, selection, latency and bandwidth, stores and evictions, faults.",
        ROWS,
    )
