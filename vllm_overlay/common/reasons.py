# SPDX-License-Identifier: Apache-2.0
"""Why something was limited, dropped or failed: every value of the metric label ``reason`` but the names of hooks.

The lists of docs/metrics.md are made from the sets below: python -m devtools.metrics_page
"""

from enum import StrEnum


class Reason(StrEnum):
    """A metric label. What a reason is said of decides what it means: see the sets below."""

    # What kept a restore point from being higher.
    NONE = "none"
    """The prompt has no whole match unit below its last token."""
    PROMPT_END = "prompt_end"
    """Nothing is missing: what follows the last match unit below the prompt's last token is always computed."""
    GRANULARITY = "granularity"
    """Nothing is missing, but restore points are so coarse that a match unit or more is recomputed."""
    DRAFTER = "drafter"
    """Nothing is missing, but vLLM drops a match unit from each hit: the drafter reads ahead."""
    ATTENTION = "attention"
    """A full-attention group has no more chunks of this prompt."""
    EVICTED = "evicted"
    """The tier had more of this prompt's full attention, and has evicted it."""
    STATE = "state"
    """Attention reaches further, but no snapshot does."""
    WINDOW = "window"
    """A snapshot or attention reaches further, but a chunk of a sliding window there is missing."""

    # An offer that was not used.
    NOT_TAKEN = "not_taken"
    """It was offered, and the request was admitted without it: another tier loads, computing is faster, a setting
    leaves it out, or the request reads no cache (prompt logprobs)."""
    LOAD_FAILED = "load_failed"
    """It was offered, and its load failed: `vllm:hybrid_offload_failed_loads` says why."""

    # The request or its adapter.
    ADAPTER = "adapter"
    """The LoRA adapter is not known to all ranks, or is not the one that the object was named by."""
    NOT_PLANNED = "not_planned"
    """A load was promised, and its objects were gone when it was allocated."""

    # Room.
    NO_ROOM = "no_room"
    """The tier could make no room, or none in time, or may not write so much now."""
    STAGING_FULL = "staging_full"
    """A rank had no host memory for it within the pass."""
    TRANSFER_FULL = "transfer_full"
    """The device ring had no room for it within the pass."""
    TOO_LARGE = "too_large"
    """An object is larger than the staging memory can ever hold."""

    # The disk, or whatever the tier stores on.
    NO_SPACE = "no_space"
    """The file system is full, or its quota is."""
    IO_ERROR = "io_error"
    """The operating system reported an error."""
    BREAKER = "breaker"
    """The circuit breaker is open: so many attempts have failed that none is made now."""

    # The object.
    MISSING = "missing"
    """Its file is gone."""
    HEADER = "header"
    """Its file's header does not verify, or is another object's."""
    SIZE = "size"
    """Its file has another size than its header says."""
    CHECKSUM = "checksum"
    """Its bytes do not verify."""
    GENERATION = "generation"
    """Its memory has been given to another object."""
    BAD_BLOCKS = "bad_blocks"
    """A load failed in a pass that may have computed from it."""

    # Time, and faults of our own.
    TIMEOUT = "timeout"
    """It took longer than ``load_timeout_s``."""
    NOT_REPORTED = "not_reported"
    """A rank did not report it within ``report_timeout_s``."""
    CLOSED = "closed"
    """The engine ends, or drops its cache."""
    TRANSFER_ERROR = "transfer_error"
    """The copy between the KV cache and host memory failed."""
    HOOK_ERROR = "hook_error"
    """An unexpected exception in a hook; ``vllm:hybrid_offload_hook_errors`` names the hook."""
    ERROR = "error"
    """An unexpected exception in a thread of the tier; the log has it."""

    # An offer below a MultiConnector.
    LOAD_OFF = "load_off"
    """The child's switch `load` is off."""
    MIN_TOKENS = "min_tokens"
    """It is of fewer tokens than the child's `min_tokens`."""
    ATTEMPTS = "attempts"
    """Loads of the request have failed `max_load_attempts` times."""
    WITHHELD = "withheld"
    """The child gets no blocks of the request since its first admission: its switch `store` or `promote` is off."""


LOOKUP_LIMITS = frozenset(
    {
        Reason.NONE, Reason.PROMPT_END, Reason.GRANULARITY, Reason.ATTENTION, Reason.STATE, Reason.WINDOW,
        Reason.ADAPTER, Reason.BREAKER, Reason.ATTEMPTS,
    }
)  # fmt: skip
"""What ``vllm:hybrid_offload_lookup_limits`` says."""

LOST_TOKENS = LOOKUP_LIMITS | {Reason.DRAFTER, Reason.EVICTED, Reason.NOT_TAKEN, Reason.LOAD_FAILED}
"""What ``vllm:hybrid_offload_lost_tokens`` says."""

GROUP_KINDS = {
    Reason.ATTENTION: "full", Reason.EVICTED: "full", Reason.STATE: "recurrent", Reason.WINDOW: "sliding"
}  # fmt: skip
"""The kind of KV cache group that a reason speaks of: the label ``group_kind``, which is empty for all others."""

DROPPED_STORES = frozenset(
    {
        Reason.NO_ROOM, Reason.STAGING_FULL, Reason.TRANSFER_FULL, Reason.TRANSFER_ERROR,
        Reason.NO_SPACE, Reason.IO_ERROR, Reason.BREAKER, Reason.ADAPTER, Reason.NOT_REPORTED, Reason.CLOSED,
        Reason.BAD_BLOCKS, Reason.HOOK_ERROR, Reason.ERROR,
    }
)  # fmt: skip
"""What ``vllm:hybrid_offload_dropped_stores`` says."""

FAILED_LOADS = frozenset(
    {
        Reason.NOT_PLANNED, Reason.MISSING, Reason.HEADER, Reason.SIZE, Reason.CHECKSUM,
        Reason.GENERATION, Reason.TOO_LARGE, Reason.IO_ERROR, Reason.BREAKER, Reason.ADAPTER, Reason.TIMEOUT,
        Reason.NOT_REPORTED, Reason.CLOSED, Reason.TRANSFER_ERROR, Reason.HOOK_ERROR, Reason.ERROR,
    }
)  # fmt: skip
"""What ``vllm:hybrid_offload_failed_loads`` says."""

IGNORED_OFFERS = frozenset({Reason.LOAD_OFF, Reason.MIN_TOKENS, Reason.ATTEMPTS, Reason.WITHHELD})
"""What ``vllm:kv_connector_ignored_offers`` and ``vllm:kv_connector_ignored_offer_tokens`` say."""
