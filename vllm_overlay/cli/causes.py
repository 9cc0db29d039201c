# SPDX-License-Identifier: Apache-2.0
"""Why a server has restored nothing: the likeliest cause, by its metrics alone, in a sentence that says what to do."""

from collections.abc import Callable

from vllm_overlay.common.reasons import Reason
from vllm_overlay.metrics import CONNECTOR, REASON
from vllm_overlay.server.interval import Interval

MULTI, TIER = "vllm:kv_connector", "vllm:hybrid_offload"
_QUERIED = f"{TIER}_queried_tokens_total"
_CONFIG = "vllm:cache_config_info"
"""vLLM's own, whose labels are the settings of its cache."""

_DROPPED: dict[str, str] = {
    Reason.NO_ROOM: "no store found room: raise capacity_bytes, or look for a word on the file system in the log",
    Reason.NO_SPACE: "the file system of the disk tier is full: free space there, or set capacity_bytes lower",
    Reason.IO_ERROR: "the disk tier cannot write: look at the kernel's log and at the disk",
    Reason.BREAKER: "the disk tier cannot write: look at the kernel's log and at the disk",
    Reason.STAGING_FULL: "the disk is slower than the engine: raise staging_bytes or write_threads",
    Reason.TRANSFER_FULL: "the device's buffer is too small for an object: raise device_buffer_bytes",
    Reason.ADAPTER: "the ranks do not agree on the LoRA adapter's weights: give all of them the same files",
}
"""What to do where nothing is stored, by why stores were dropped."""

_FAILED: dict[str, str] = {
    Reason.MISSING: "files of the disk tier were removed: keep cleaners away from its root",
    Reason.TIMEOUT: "loads took longer than load_timeout_s: look at the disk, or raise it",
    Reason.TOO_LARGE: "an object is larger than the staging memory: raise staging_bytes",
}
"""What to do where loads failed, by why."""


def cause(interval: Interval) -> str:
    """Empty when something was restored. The first cause that applies is the likeliest: those that keep every request
    from being restored come before those of single prompts."""
    restored = f"{TIER}_restored_tokens_total" if _counts_tokens(interval) else "vllm:external_prefix_cache_hits_total"
    if interval.amount(restored):
        return ""
    return next((sentence for find in _CAUSES if (sentence := find(interval))), "")


def tiers_without_room(interval: Interval) -> list[str]:
    """Those that have no capacity where they are."""
    samples = interval.after.samples(f"{TIER}_capacity_bytes")
    return list(dict.fromkeys(sample.labels.get(CONNECTOR, "") for sample in samples if not sample.value))


def _counts_tokens(interval: Interval) -> bool:
    """A tier below vLLM's OffloadingConnector does not: vLLM counts what that restores."""
    return bool(interval.after.samples(_QUERIED))


def _no_prefix_cache(interval: Interval) -> str:
    if interval.after.samples(_CONFIG, enable_prefix_caching="False"):
        return (
            "vLLM's prefix cache is off, and without it nothing is stored: set --enable-prefix-caching, and for a "
            "model with states --mamba-cache-mode align"
        )
    return ""


def _out_of_service(interval: Interval) -> str:
    for name in interval.connectors(f"{MULTI}_state"):
        if interval.worst(f"{MULTI}_state", **{CONNECTOR: name}):
            return f"connector {name} is out of service: the server's log says why"
    return ""


def _paused(interval: Interval) -> str:
    if interval.worst(f"{TIER}_loads_paused"):
        return "so many reads have failed that loads are paused: look at the kernel's log and at the disk"
    return ""


def _not_asked(interval: Interval) -> str:
    """No tier was asked about a token beyond the device's cache."""
    if interval.amount(_QUERIED):
        return ""
    hits = interval.amount("vllm:prefix_cache_hits_total")
    if not (hits or interval.amount("vllm:prompt_tokens_total")):
        return "no request has come"
    if not _counts_tokens(interval):
        return ""
    if hits:
        return _in_the_device(hits)
    return (
        "no request has been counted: one that loads counts when its load has ended, one that a child with store off "
        "does not see when it is over"
    )


def _nothing_stored(interval: Interval) -> str:
    """Nor was anything there before."""
    if interval.amount(f"{TIER}_stored_objects_total") or interval.now(f"{TIER}_objects"):
        return ""
    if names := tiers_without_room(interval):
        return f"tier {names[0]} can store nothing where it is: the server's log names min_free_bytes or root"
    if dropped := _largest(interval.by_label(f"{TIER}_dropped_stores_total", REASON)):
        words = _DROPPED.get(dropped, "the server's log has the error")
        return f"nothing was stored (dropped for {dropped}); {words}"
    if _largest_loss(interval) == Reason.NONE:
        return ""
    return (
        "nothing was stored: the prompts may be shorter than a chunk, the switch store of a child off, or "
        "store_on_nth_use above 1"
    )


def _loads_failed(interval: Interval) -> str:
    if failed := _largest(interval.by_label(f"{TIER}_failed_loads_total", REASON)):
        words = _FAILED.get(failed, "the server's log names each request")
        return f"loads failed ({failed}); {words}"
    return ""


def _of_tokens(interval: Interval) -> str:
    """By the largest reason of what was not restored."""
    found = _BY_REASON.get(_largest_loss(interval), _not_known)
    return found if isinstance(found, str) else found(interval)


def _short(interval: Interval) -> str:
    unit = int(interval.worst(f"{TIER}_restore_unit_tokens"))
    if unit >= interval.worst(f"{TIER}_block_tokens") and interval.worst(f"{TIER}_state_bytes"):
        return (
            f"the prompts are shorter than {unit} tokens, where the first restore point is: set --prefix-match-unit "
            "64, or what vllm-overlay plan says"
        )
    return (
        f"the prompts are shorter than {unit} tokens, where the first restore point is: nothing of them can be restored"
    )


def _coarse(interval: Interval) -> str:
    unit = int(interval.worst(f"{TIER}_restore_unit_tokens"))
    return f"restore points lie {unit} tokens apart: set a finer --prefix-match-unit or hybrid_chunk_size"


def _window(interval: Interval) -> str:
    """A tier whose model has no full attention calls so what it never had, too."""
    return _TOO_SMALL if interval.now(f"{TIER}_evicted_objects_total") else _not_known(interval)


def _not_known(interval: Interval) -> str:
    if interval.amount(f"{TIER}_lost_tokens_total", **{REASON: Reason.EVICTED}):
        return _TOO_SMALL
    if hits := interval.amount("vllm:prefix_cache_hits_total"):
        return _in_the_device(hits)
    return (
        "no prompt has come a second time: only what begins with the same tokens, under the same cache_salt and "
        "adapter, is restored"
    )


def _in_the_device(hits: float) -> str:
    return (
        f"what came again was still in vLLM's own cache ({hits:,.0f} tokens): tiers restore what that has lost, and "
        "after a restart"
    )


def _other_way(interval: Interval) -> str:
    if interval.amount(f"{MULTI}_too_slow_total"):
        return (
            "computing was expected to be faster than loading (load_weight auto): a number as load_weight overrides it"
        )
    if ignored := _largest(interval.by_label(f"{MULTI}_ignored_offers_total", REASON)):
        return f"a setting leaves out what tiers offer ({ignored}): look at load and min_tokens, and the control file"
    if interval.amount(f"{MULTI}_chosen_total"):
        return "other connectors loaded what the tiers offered"
    if hits := interval.amount("vllm:prefix_cache_hits_total"):
        return _in_the_device(hits)
    return "vLLM did not take what the tiers offered: requests with prompt_logprobs read no cache"


def _largest_loss(interval: Interval) -> str:
    return _largest(interval.by_label(f"{TIER}_lost_tokens_total", REASON))


def _largest(amounts: dict[str, float]) -> str:
    """Its key; empty when there is none."""
    return max(amounts, key=lambda key: amounts[key], default="")


_TOO_SMALL = (
    "the tiers are too small, what came again had been evicted: raise capacity_bytes to what vllm-overlay plan says"
)
_BY_REASON: dict[str, str | Callable[[Interval], str]] = {
    Reason.NONE: _short,
    Reason.GRANULARITY: _coarse,
    Reason.DRAFTER: "vLLM drops a match unit from each hit, because the drafter reads ahead: set a finer "
    "--prefix-match-unit",
    Reason.EVICTED: _TOO_SMALL,
    Reason.WINDOW: _window,
    Reason.STATE: "the prompts share beginnings, and no state was kept where they part: the next prompt with the same "
    "beginning finds one, or set speculative_snapshot_tokens",
    Reason.NOT_TAKEN: _other_way,
    Reason.ADAPTER: "the LoRA adapter's weights are not known: load it ahead by --lora-modules, from the same files in "
    "all ranks",
}

_CAUSES = (_no_prefix_cache, _out_of_service, _paused, _not_asked, _nothing_stored, _loads_failed, _of_tokens)
