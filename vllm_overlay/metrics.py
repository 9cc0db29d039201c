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
"""Label: the method of vLLM's connector interface that raised."""


@dataclass(slots=True, frozen=True)
class CounterName:
    """One counter. ``field`` is the key of its increments in the stats payload."""

    field: str
    name: str
    documentation: str
    labels: tuple[str, ...] = (CONNECTOR,)


MULTI_CONNECTOR = (
    CounterName("queries", "vllm:kv_connector_queries", "Admitted requests this connector was asked about."),
    CounterName("asked_tokens", "vllm:kv_connector_asked_tokens", "Tokens beyond the device cache it was asked about."),
    CounterName("offered_tokens", "vllm:kv_connector_offered_tokens", "Tokens it offered to load."),
    CounterName("chosen", "vllm:kv_connector_chosen", "Requests for which it was chosen and asked to load."),
    CounterName("outbid", "vllm:kv_connector_outbid", "Requests for which it had tokens but another was chosen."),
    CounterName(
        "too_slow",
        "vllm:kv_connector_too_slow",
        "Requests for which it had tokens but computing them was expected to be faster (selection by cost).",
    ),
    CounterName("loaded_tokens", "vllm:kv_connector_loaded_tokens", "Tokens it reported loaded."),
    CounterName("failed_loads", "vllm:kv_connector_failed_loads", "Loads it was chosen for that failed."),
    CounterName(
        "load_seconds", "vllm:kv_connector_load_seconds", "Seconds from the allocation of a load to its completion."
    ),
    CounterName(
        "lookup_wait_seconds",
        "vllm:kv_connector_lookup_wait_seconds",
        "Seconds admitted requests waited because this connector was still looking.",
    ),
    CounterName(
        "invalid_answers",
        "vllm:kv_connector_invalid_answers",
        "Lookups answered with something impossible (negative, not a number, more than the prompt); taken as 0.",
    ),
    CounterName(
        "ignored_reports",
        "vllm:kv_connector_ignored_reports",
        "Completions it reported twice, or of requests it had not been given.",
    ),
    CounterName("isolations", "vllm:kv_connector_isolations", "Times it was taken out of service in a process."),
    CounterName("returns", "vllm:kv_connector_returns", "Times it came back into service as a new instance."),
    CounterName("hangs", "vllm:kv_connector_hangs", "Hooks of it that took longer than hang_after_s."),
)
"""What a MultiConnector counts for each child; labels ``connector``."""

MULTI_CONNECTOR_ERRORS = CounterName(
    "errors", "vllm:kv_connector_errors", "Exceptions it raised while serving.", (CONNECTOR, HOOK)
)

MULTI_CONNECTOR_GAUGES = (
    CounterName(
        "state",
        "vllm:kv_connector_state",
        "Its circuit breaker: 0 serving, 1 stopping, 2 open (waits to be tried again), "
        "3 half open (a new instance is being started).",
    ),
    CounterName(
        "quarantined_requests",
        "vllm:kv_connector_quarantined_requests",
        "Requests whose blocks are held because it is out of service and may still touch them.",
    ),
)
"""What a MultiConnector's scheduler side says of each child; labels ``connector``."""

REASON = "reason"
"""Label: why something was dropped, failed or limited."""

HYBRID_OFFLOAD_COUNTERS = (
    CounterName("lookups", "vllm:hybrid_offload_lookups", "Prompts looked up in the tier."),
    CounterName("queried_tokens", "vllm:hybrid_offload_queried_tokens", "Tokens looked up beyond the device cache."),
    CounterName(
        "lookup_limits",
        "vllm:hybrid_offload_lookup_limits",
        "Lookups by what kept their restore point from being higher.",
        (CONNECTOR, REASON),
    ),
    CounterName("restored_requests", "vllm:hybrid_offload_restored_requests", "Requests whose load was started."),
    CounterName("restored_tokens", "vllm:hybrid_offload_restored_tokens", "Tokens whose load was started."),
    CounterName("loaded_objects", "vllm:hybrid_offload_loaded_objects", "Chunks and snapshots loaded, of all ranks."),
    CounterName("loaded_bytes", "vllm:hybrid_offload_loaded_bytes", "Bytes loaded, of all ranks."),
    CounterName("load_seconds", "vllm:hybrid_offload_load_seconds", "Seconds that loads took, of all ranks."),
    CounterName("stored_objects", "vllm:hybrid_offload_stored_objects", "Chunks and snapshots stored, of all ranks."),
    CounterName("stored_bytes", "vllm:hybrid_offload_stored_bytes", "Bytes stored, of all ranks."),
    CounterName("store_seconds", "vllm:hybrid_offload_store_seconds", "Seconds that stores took, of all ranks."),
    CounterName(
        "dropped_stores", "vllm:hybrid_offload_dropped_stores", "Stores that were given up.", (CONNECTOR, REASON)
    ),
    CounterName("failed_loads", "vllm:hybrid_offload_failed_loads", "Loads that failed.", (CONNECTOR, REASON)),
    CounterName("hook_errors", "vllm:hybrid_offload_hook_errors", "Unexpected errors by hook.", (CONNECTOR, REASON)),
)
"""What HybridOffloadConnector counts; ``reason`` is the hook for ``hook_errors``."""

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
    CounterName("evicted_objects", "vllm:hybrid_offload_evicted_objects", "Objects evicted since start."),
    CounterName("pending_stores", "vllm:hybrid_offload_pending_stores", "Stores that are not reported yet."),
    CounterName("pending_loads", "vllm:hybrid_offload_pending_loads", "Loads that are not reported yet."),
)
