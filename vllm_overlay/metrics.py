# SPDX-License-Identifier: Apache-2.0
"""Every Prometheus metric and label in one place: a row here, and a call of ``Tally`` where it happens.

All names start with ``vllm:``, because vLLM drops what starts so when it rebuilds its metrics. Names are written here
as ``prometheus_client`` takes them; it exposes a counter with the suffix ``_total``. Every metric carries vLLM's own
labels (``model_name``, ``engine``) before the labels named here.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType

from vllm_overlay.common.reasons import DROPPED_STORES, FAILED_LOADS, IGNORED_OFFERS, LOOKUP_LIMITS, LOST_TOKENS

CONNECTOR = "connector"
"""Label: the configured name of a MultiConnector's child, or of the connector itself when it is used alone."""
HOOK = "hook"
"""Label: the method of vLLM's connector interface that was called; ``multi_connector/hooks.py`` has all of them."""
GROUP_KIND = "group_kind"
"""Label: the kind of KV cache group that a reason speaks of; ``common/reasons.py`` has all of them. Empty for none."""
REASON = "reason"
"""Label: why something was dropped, failed, limited or ignored; ``common/reasons.py`` has all of them."""
SOURCE = "source"
"""Label: where most of a prompt came from; see ``Source``."""


class Source(StrEnum):
    """Where most of a prompt came from when it began to be computed."""

    TIER = "tier"
    """This connector loaded most of it."""
    DEVICE = "device"
    """Most of it was in vLLM's own KV cache."""
    OTHER = "other"
    """Another connector below the same MultiConnector loaded most of it."""
    COMPUTED = "computed"
    """Most of it was computed."""


class Kind(StrEnum):
    """What Prometheus calls a metric's type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


PLAIN = ("",)
"""The one series of a metric without a label of its own."""


@dataclass(slots=True, frozen=True)
class Metric:
    """One metric."""

    kind: Kind
    name: str
    documentation: str
    labels: tuple[str, ...] = (CONNECTOR,)
    """The second is the one that ``Tally`` is told; a third follows from it."""
    zeros: Collection[str] = PLAIN
    """The values of the second label whose series are there with 0 before anything is counted."""
    buckets: tuple[float, ...] = ()
    """A histogram's upper bounds, in the unit of its name."""


def _by_reason(name: str, documentation: str, zeros: Collection[str], *more: str) -> Metric:
    return Metric(Kind.COUNTER, name, documentation, (CONNECTOR, REASON, *more), zeros)


def _family(prefix: str, *metrics: Metric) -> Mapping[str, Metric]:
    return MappingProxyType({metric.name.removeprefix(prefix): metric for metric in metrics})


_counter, _gauge = partial(Metric, Kind.COUNTER), partial(Metric, Kind.GAUGE)
_by_hook = partial(Metric, Kind.COUNTER, labels=(CONNECTOR, HOOK), zeros=())
_histogram = partial(Metric, Kind.HISTOGRAM)
_level = partial(Metric, Kind.GAUGE, zeros=())
_LOOKUP_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_TRANSFER_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)

HYBRID_OFFLOAD = _family(
    "vllm:hybrid_offload_",
    _counter("vllm:hybrid_offload_lookups", "Lookups in the tier, repeated ones too."),
    _counter(
        "vllm:hybrid_offload_queried_tokens",
        "Tokens of admitted requests beyond the device cache: restored_tokens and all lost_tokens together.",
    ),
    _by_reason(
        "vllm:hybrid_offload_lookup_limits",
        "Lookups by what kept their restore point from being higher.",
        LOOKUP_LIMITS,
    ),
    _by_reason(
        "vllm:hybrid_offload_lost_tokens",
        "Tokens of admitted requests beyond the device cache that were not restored, by why.",
        LOST_TOKENS,
        GROUP_KIND,
    ),
    _counter("vllm:hybrid_offload_restored_requests", "Requests that were loaded."),
    _counter("vllm:hybrid_offload_restored_tokens", "Tokens that were loaded."),
    _counter("vllm:hybrid_offload_loaded_objects", "Chunks and snapshots loaded, of all ranks."),
    _counter("vllm:hybrid_offload_loaded_bytes", "Bytes loaded, of all ranks."),
    _counter("vllm:hybrid_offload_stored_objects", "Chunks and snapshots stored, of all ranks."),
    _counter("vllm:hybrid_offload_stored_bytes", "Bytes stored, of all ranks."),
    _counter("vllm:hybrid_offload_evicted_objects", "Chunks and snapshots evicted."),
    _by_reason("vllm:hybrid_offload_dropped_stores", "Stores that were given up.", DROPPED_STORES),
    _by_reason("vllm:hybrid_offload_failed_loads", "Loads that failed.", FAILED_LOADS),
    _by_reason("vllm:hybrid_offload_hook_errors", "Unexpected errors by hook.", ()),
    _histogram(
        "vllm:hybrid_offload_lookup_seconds", "Seconds that each lookup in the tier took.", buckets=_LOOKUP_SECONDS
    ),
    _histogram(
        "vllm:hybrid_offload_load_seconds",
        "Seconds from the allocation of a request's blocks until all ranks have loaded it; failed loads are not in it.",
        buckets=_TRANSFER_SECONDS,
    ),
    _histogram(
        "vllm:hybrid_offload_store_seconds",
        "Seconds that a rank took to keep one chunk or snapshot, its wait for a write thread included; "
        "dropped stores are not in it.",
        buckets=(0.0001, 0.0002, 0.0005, *_TRANSFER_SECONDS),
    ),
    _histogram(
        "vllm:hybrid_offload_first_token_seconds",
        "Seconds from a request's arrival to its first output token, by where most of its prompt came from.",
        (CONNECTOR, SOURCE),
        tuple(Source),
        buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0),
    ),
    _level("vllm:hybrid_offload_objects", "Chunks and snapshots in the tier."),
    _level("vllm:hybrid_offload_used_bytes", "Bytes in the tier, of all ranks."),
    _level("vllm:hybrid_offload_capacity_bytes", "Limit of the tier in bytes, all ranks."),
    _level("vllm:hybrid_offload_token_bytes", "Attention KV of one token in bytes, all ranks."),
    _level("vllm:hybrid_offload_state_bytes", "Recurrent states of a snapshot in bytes, all ranks."),
    _level("vllm:hybrid_offload_chunk_tokens", "Tokens in a chunk of attention."),
    _level("vllm:hybrid_offload_restore_unit_tokens", "Restore points are multiples of so many tokens."),
    _level("vllm:hybrid_offload_dropped_tokens", "Tokens by which each hit is shorter, because a drafter reads ahead."),
    _level("vllm:hybrid_offload_block_tokens", "Tokens in the largest block of vLLM's cache."),
    _level("vllm:hybrid_offload_pending_stores", "Stores that are not reported yet."),
    _level("vllm:hybrid_offload_pending_loads", "Loads that are not reported yet."),
    _level(
        "vllm:hybrid_offload_loads_paused",
        "1 while the read circuit breaker of a rank is open, so that nothing is offered; else 0.",
    ),
)
"""What HybridOffloadConnector counts, by the name that its tally knows; ``reason`` is the hook for ``hook_errors``."""

MULTI_CONNECTOR = _family(
    "vllm:kv_connector_",
    _counter("vllm:kv_connector_queries", "Admitted requests this connector was asked about."),
    _counter("vllm:kv_connector_asked_tokens", "Tokens beyond the device cache it was asked about."),
    _counter("vllm:kv_connector_offered_tokens", "Tokens it offered to load."),
    _counter("vllm:kv_connector_chosen", "Requests for which it was chosen and asked to load."),
    _counter(
        "vllm:kv_connector_trials",
        "Requests it loaded though another way was expected to be faster, to measure it (load_weight auto).",
    ),
    _counter("vllm:kv_connector_outbid", "Requests for which it had tokens but another was chosen."),
    _counter("vllm:kv_connector_outbid_tokens", "Tokens it offered for requests that another was chosen for."),
    _counter(
        "vllm:kv_connector_too_slow",
        "Requests for which it had tokens but computing them was expected to be faster (load_weight auto).",
    ),
    _counter("vllm:kv_connector_too_slow_tokens", "Tokens it offered that computing was expected to be faster for."),
    _counter("vllm:kv_connector_loaded_tokens", "Tokens it reported loaded."),
    _counter("vllm:kv_connector_failed_loads", "Loads it was chosen for that failed."),
    _counter(
        "vllm:kv_connector_lookup_wait_seconds",
        "Seconds admitted requests waited because this connector was still looking.",
    ),
    _counter(
        "vllm:kv_connector_invalid_answers",
        "Lookups answered with something impossible (negative, not a number, more than the prompt). They count as 0.",
    ),
    _counter(
        "vllm:kv_connector_ignored_reports", "Completions it reported twice, or of requests it had not been given."
    ),
    _counter(
        "vllm:kv_connector_isolations", "Times it left service. Isolations minus returns is 1 while it is out, else 0."
    ),
    _counter("vllm:kv_connector_returns", "Times it came back into service as a new instance."),
    _counter("vllm:kv_connector_hangs", "Hooks of it that took longer than hang_after_s."),
    _by_hook("vllm:kv_connector_errors", "Exceptions it raised while serving."),
    _by_hook("vllm:kv_connector_hook_seconds", "Seconds in its hooks, of all processes."),
    _by_reason(
        "vllm:kv_connector_ignored_offers",
        "Requests for which it had tokens that its settings leave out of the decision.",
        IGNORED_OFFERS,
    ),
    _by_reason(
        "vllm:kv_connector_ignored_offer_tokens",
        "Tokens it had that its settings leave out of the decision; they are not in offered_tokens.",
        IGNORED_OFFERS,
    ),
    _histogram(
        "vllm:kv_connector_lookup_seconds",
        "Seconds that each call of its lookup took (get_num_new_matched_tokens).",
        buckets=_LOOKUP_SECONDS,
    ),
    _histogram(
        "vllm:kv_connector_load_seconds",
        "Seconds from the allocation of an asynchronous load to its completion; failed loads are not in it.",
        buckets=_TRANSFER_SECONDS,
    ),
    _gauge(
        "vllm:kv_connector_state",
        "Its circuit breaker: 0 serving, 1 stopping, 2 open (waits to be tried again), "
        "3 half open (a new instance is being started).",
    ),
    _level(
        "vllm:kv_connector_load_weight",
        "The weight of its last offer: configured, or what load_weight auto measured; 0: computing is faster. "
        "The series begins with the first offer.",
    ),
    _gauge(
        "vllm:kv_connector_quarantined_requests",
        "Requests whose blocks are held because it is out of service and may still touch them.",
    ),
)
"""What a MultiConnector counts of each child, by the name that the child's tally knows."""

BUCKETS = {
    field: metric.buckets
    for family in (HYBRID_OFFLOAD, MULTI_CONNECTOR)
    for field, metric in family.items()
    if metric.buckets
}
"""Of each histogram. What both families measure has the same buckets in both."""
