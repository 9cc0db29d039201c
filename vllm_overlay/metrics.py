# SPDX-License-Identifier: Apache-2.0
"""Every Prometheus name and label in one place.

All names start with ``vllm:``, because vLLM drops what starts so when it rebuilds its metrics. Names are written here
as ``prometheus_client`` takes them; it exposes a counter with the suffix ``_total``. Every metric carries vLLM's own
labels (``model_name``, ``engine``) before the labels named here.
"""

from dataclasses import dataclass

CONNECTOR = "connector"
"""Label: the configured name of a MultiConnector's child, or of the connector itself when it is used alone."""
HOOK = "hook"
"""Label: the method of vLLM's connector interface that was called; ``multi_connector/hooks.py`` has all of them."""
GROUP_KIND = "group_kind"
"""Label: the kind of KV cache group that a reason speaks of; ``common/reasons.py`` has all of them. Empty for none."""
REASON = "reason"
"""Label: why something was dropped, failed, limited or ignored; ``common/reasons.py`` has all of them."""
SOURCE = "source"
"""Label: where most of a prompt came from; ``connector/metrics.py`` has all of them."""


@dataclass(slots=True, frozen=True)
class CounterName:
    """One counter. ``field`` is the key of its increments in the stats payload."""

    field: str
    name: str
    documentation: str
    labels: tuple[str, ...] = (CONNECTOR,)


@dataclass(slots=True, frozen=True)
class HistogramName:
    """One histogram. ``buckets``: the upper bounds, in the unit of its name."""

    field: str
    name: str
    documentation: str
    buckets: tuple[float, ...]
    labels: tuple[str, ...] = (CONNECTOR,)


_LOOKUP_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_TRANSFER_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)

MULTI_CONNECTOR = (
    CounterName("queries", "vllm:kv_connector_queries", "Admitted requests this connector was asked about."),
    CounterName("asked_tokens", "vllm:kv_connector_asked_tokens", "Tokens beyond the device cache it was asked about."),
    CounterName("offered_tokens", "vllm:kv_connector_offered_tokens", "Tokens it offered to load."),
    CounterName("chosen", "vllm:kv_connector_chosen", "Requests for which it was chosen and asked to load."),
    CounterName(
        "trials",
        "vllm:kv_connector_trials",
        "Requests it loaded though another way was expected to be faster, to measure it (load_weight auto).",
    ),
    CounterName("outbid", "vllm:kv_connector_outbid", "Requests for which it had tokens but another was chosen."),
    CounterName(
        "outbid_tokens",
        "vllm:kv_connector_outbid_tokens",
        "Tokens it offered for requests that another was chosen for.",
    ),
    CounterName(
        "too_slow",
        "vllm:kv_connector_too_slow",
        "Requests for which it had tokens but computing them was expected to be faster (load_weight auto).",
    ),
    CounterName(
        "too_slow_tokens",
        "vllm:kv_connector_too_slow_tokens",
        "Tokens it offered that computing was expected to be faster for.",
    ),
    CounterName("loaded_tokens", "vllm:kv_connector_loaded_tokens", "Tokens it reported loaded."),
    CounterName("failed_loads", "vllm:kv_connector_failed_loads", "Loads it was chosen for that failed."),
    CounterName(
        "lookup_wait_seconds",
        "vllm:kv_connector_lookup_wait_seconds",
        "Seconds admitted requests waited because this connector was still looking.",
    ),
    CounterName(
        "invalid_answers",
        "vllm:kv_connector_invalid_answers",
        "Lookups answered with something impossible (negative, not a number, more than the prompt). They count as 0.",
    ),
    CounterName(
        "ignored_reports",
        "vllm:kv_connector_ignored_reports",
        "Completions it reported twice, or of requests it had not been given.",
    ),
    CounterName(
        "isolations",
        "vllm:kv_connector_isolations",
        "Times it left service. Isolations minus returns is 1 while it is out, else 0.",
    ),
    CounterName("returns", "vllm:kv_connector_returns", "Times it came back into service as a new instance."),
    CounterName("hangs", "vllm:kv_connector_hangs", "Hooks of it that took longer than hang_after_s."),
)
"""What a MultiConnector counts for each child; labels ``connector``."""

MULTI_CONNECTOR_BY_HOOK = (
    CounterName("errors", "vllm:kv_connector_errors", "Exceptions it raised while serving.", (CONNECTOR, HOOK)),
    CounterName(
        "hook_seconds", "vllm:kv_connector_hook_seconds", "Seconds in its hooks, of all processes.", (CONNECTOR, HOOK)
    ),
)
"""The same by hook; labels ``connector``, ``hook``."""

MULTI_CONNECTOR_BY_REASON = (
    CounterName(
        "ignored_offers",
        "vllm:kv_connector_ignored_offers",
        "Requests for which it had tokens that its settings leave out of the decision.",
        (CONNECTOR, REASON),
    ),
    CounterName(
        "ignored_offer_tokens",
        "vllm:kv_connector_ignored_offer_tokens",
        "Tokens it had that its settings leave out of the decision; they are not in offered_tokens.",
        (CONNECTOR, REASON),
    ),
)
"""The same by reason; labels ``connector``, ``reason``."""

MULTI_CONNECTOR_HISTOGRAMS = (
    HistogramName(
        "lookup_seconds",
        "vllm:kv_connector_lookup_seconds",
        "Seconds that each call of its lookup took (get_num_new_matched_tokens).",
        _LOOKUP_SECONDS,
    ),
    HistogramName(
        "load_seconds",
        "vllm:kv_connector_load_seconds",
        "Seconds from the allocation of an asynchronous load to its completion; failed loads are not in it.",
        _TRANSFER_SECONDS,
    ),
)
"""What a MultiConnector measures for each child; labels ``connector``."""

MULTI_CONNECTOR_GAUGES = (
    CounterName(
        "state",
        "vllm:kv_connector_state",
        "Its circuit breaker: 0 serving, 1 stopping, 2 open (waits to be tried again), "
        "3 half open (a new instance is being started).",
    ),
    CounterName(
        "load_weight",
        "vllm:kv_connector_load_weight",
        "The weight of its last offer: configured, or what load_weight auto measured; 0: computing is faster.",
    ),
    CounterName(
        "quarantined_requests",
        "vllm:kv_connector_quarantined_requests",
        "Requests whose blocks are held because it is out of service and may still touch them.",
    ),
)
"""What a MultiConnector's scheduler side says of each child; labels ``connector``."""

HYBRID_OFFLOAD_COUNTERS = (
    CounterName("lookups", "vllm:hybrid_offload_lookups", "Lookups in the tier, repeated ones too."),
    CounterName(
        "queried_tokens",
        "vllm:hybrid_offload_queried_tokens",
        "Tokens of admitted requests beyond the device cache: restored_tokens and all lost_tokens together.",
    ),
    CounterName(
        "lookup_limits",
        "vllm:hybrid_offload_lookup_limits",
        "Lookups by what kept their restore point from being higher.",
        (CONNECTOR, REASON),
    ),
    CounterName(
        "lost_tokens",
        "vllm:hybrid_offload_lost_tokens",
        "Tokens of admitted requests beyond the device cache that were not restored, by why.",
        (CONNECTOR, REASON, GROUP_KIND),
    ),
    CounterName("restored_requests", "vllm:hybrid_offload_restored_requests", "Requests that were loaded."),
    CounterName("restored_tokens", "vllm:hybrid_offload_restored_tokens", "Tokens that were loaded."),
    CounterName("loaded_objects", "vllm:hybrid_offload_loaded_objects", "Chunks and snapshots loaded, of all ranks."),
    CounterName("loaded_bytes", "vllm:hybrid_offload_loaded_bytes", "Bytes loaded, of all ranks."),
    CounterName("stored_objects", "vllm:hybrid_offload_stored_objects", "Chunks and snapshots stored, of all ranks."),
    CounterName("stored_bytes", "vllm:hybrid_offload_stored_bytes", "Bytes stored, of all ranks."),
    CounterName("evicted_objects", "vllm:hybrid_offload_evicted_objects", "Chunks and snapshots evicted."),
    CounterName(
        "dropped_stores", "vllm:hybrid_offload_dropped_stores", "Stores that were given up.", (CONNECTOR, REASON)
    ),
    CounterName("failed_loads", "vllm:hybrid_offload_failed_loads", "Loads that failed.", (CONNECTOR, REASON)),
    CounterName("hook_errors", "vllm:hybrid_offload_hook_errors", "Unexpected errors by hook.", (CONNECTOR, REASON)),
)
"""What HybridOffloadConnector counts; ``reason`` is the hook for ``hook_errors``."""

HYBRID_OFFLOAD_HISTOGRAMS = (
    HistogramName(
        "lookup_seconds",
        "vllm:hybrid_offload_lookup_seconds",
        "Seconds that each lookup in the tier took.",
        _LOOKUP_SECONDS,
    ),
    HistogramName(
        "load_seconds",
        "vllm:hybrid_offload_load_seconds",
        "Seconds from the allocation of a request's blocks until all ranks have loaded it; failed loads are not in it.",
        _TRANSFER_SECONDS,
    ),
    HistogramName(
        "store_seconds",
        "vllm:hybrid_offload_store_seconds",
        "Seconds that a rank took to keep one chunk or snapshot, its wait for a write thread included; "
        "dropped stores are not in it.",
        (0.0001, 0.0002, 0.0005, *_TRANSFER_SECONDS),
    ),
    HistogramName(
        "first_token_seconds",
        "vllm:hybrid_offload_first_token_seconds",
        "Seconds from a request's arrival to its first output token, by where most of its prompt came from.",
        (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0),
        (CONNECTOR, SOURCE),
    ),
)
"""What HybridOffloadConnector measures."""

HYBRID_OFFLOAD_GAUGES = (
    CounterName("objects", "vllm:hybrid_offload_objects", "Chunks and snapshots in the tier."),
    CounterName("used_bytes", "vllm:hybrid_offload_used_bytes", "Bytes in the tier, of all ranks."),
    CounterName("capacity_bytes", "vllm:hybrid_offload_capacity_bytes", "Limit of the tier in bytes, all ranks."),
    CounterName("token_bytes", "vllm:hybrid_offload_token_bytes", "Attention KV of one token in bytes, all ranks."),
    CounterName(
        "state_bytes", "vllm:hybrid_offload_state_bytes", "Recurrent states of a snapshot in bytes, all ranks."
    ),
    CounterName("chunk_tokens", "vllm:hybrid_offload_chunk_tokens", "Tokens in a chunk of attention."),
    CounterName(
        "restore_unit_tokens",
        "vllm:hybrid_offload_restore_unit_tokens",
        "Restore points are multiples of so many tokens.",
    ),
    CounterName("block_tokens", "vllm:hybrid_offload_block_tokens", "Tokens in the largest block of vLLM's cache."),
    CounterName("pending_stores", "vllm:hybrid_offload_pending_stores", "Stores that are not reported yet."),
    CounterName("pending_loads", "vllm:hybrid_offload_pending_loads", "Loads that are not reported yet."),
    CounterName(
        "loads_paused",
        "vllm:hybrid_offload_loads_paused",
        "1 while the read circuit breaker of a rank is open, so that nothing is offered; else 0.",
    ),
)
