# SPDX-License-Identifier: Apache-2.0
"""What an operator should know before a start: settings that work and cost hits, exactness or room."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vllm_overlay.config import as_size
from vllm_overlay.planner.geometry import EXACT_TOKENS, finer_match_unit
from vllm_overlay.planning.capacity import Conversation, TierCapacity
from vllm_overlay.planning.host_memory import HostMemory
from vllm_overlay.planning.question import EngineLayout, Flags

CUDA = "cuda"


class Severity(StrEnum):
    NOTE = "note"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence that names the setting and a value that works."""

    severity: Severity
    setting: str
    sentence: str
    ends_a_start: bool = False
    """A server that is started now, as things are here, would refuse to start."""


def _warning(setting: str, sentence: str, ends_a_start: bool = False) -> Advice:
    return Advice(Severity.WARNING, setting, sentence, ends_a_start)


def _note(setting: str, sentence: str) -> Advice:
    return Advice(Severity.NOTE, setting, sentence)


def advice(
    flags: Flags,
    layout: EngineLayout,
    match_unit: int,
    tiers: Sequence[TierCapacity],
    conversation: Conversation,
    memory: HostMemory,
    shortages: Sequence[str],
    platform: str = "",
) -> list[Advice]:
    """All that applies, in the order of the flags.

    ``shortages``: what disk tiers will say of their volumes. ``platform``: see ``make_plan``.
    """
    return [
        *(_of_offloading(layout) if platform == CUDA else _of_platform(layout)),
        *_of_match_unit(flags, layout, match_unit),
        *_of_drafter(layout, match_unit),
        *_of_step_budget(flags, layout),
        *_of_retention(flags, layout, tiers),
        *_of_memory(memory),
        *(_warning("--disk", f"{shortage}. The SIZE of --disk is capacity_bytes") for shortage in shortages),
        *_of_capacity(tiers, conversation),
    ]


def _of_platform(layout: EngineLayout) -> Iterator[Advice]:
    if layout.platform != "cpu":
        yield _warning(
            "vLLM's platform",
            f"this version is new on {layout.platform!r}: before you serve with it, run what docs/gpu.md says. "
            "--platform cuda plans vLLM's own copies over our disk tier",
        )


def _of_offloading(layout: EngineLayout) -> Iterator[Advice]:
    """Against our own copies, which are new on GPUs."""
    yield _note(
        "--platform",
        "vLLM's OffloadingConnector copies, and ours keeps the disk: no junctions, no learned eviction, no LoRA, no "
        f"speculative decoding, and inside a block of {layout.block_size} tokens no hit but at a prompt's end",
    )
    yield _note(
        "--cpu",
        "vLLM keeps it in /dev/shm, which must be larger: docker's is 64 MiB unless --shm-size or --ipc=host says more",
    )
    if layout.platform != CUDA:
        yield _warning(
            "--platform",
            f"blocks and bytes are those of {layout.platform!r}, which this machine has: ask on the one that serves",
        )


def _of_match_unit(flags: Flags, layout: EngineLayout, match_unit: int) -> Iterator[Advice]:
    finer = finer_match_unit(layout.groups)
    default = layout.default_match_unit
    if layout.takes_match_unit and match_unit == default and finer < default:
        yield _warning(
            "--prefix-match-unit",
            f"hits are found at multiples of {match_unit} tokens only: set --prefix-match-unit {finer}",
        )
    elif layout.takes_match_unit and flags.prefix_match_unit is None and match_unit < default:
        yield _note(
            "--prefix-match-unit",
            f"it was not given: the command has {match_unit}, and without it hits are found at multiples of {default} "
            "tokens only",
        )
    if layout.has_states and match_unit % EXACT_TOKENS:
        exact_block = EXACT_TOKENS * -(-layout.block_size // EXACT_TOKENS)
        yield _warning(
            "--prefix-match-unit",
            f"{match_unit} is no multiple of {EXACT_TOKENS}: with GDN layers a restore then equals vLLM's own device "
            f"cache, and not to the last bit what is computed. --block-size {exact_block} --prefix-match-unit "
            f"{EXACT_TOKENS} is exact",
        )


def _of_drafter(layout: EngineLayout, match_unit: int) -> Iterator[Advice]:
    if layout.has_dropping_drafter:
        default = layout.default_match_unit
        coarse = f", and {default} without --prefix-match-unit {match_unit}" if match_unit < default else ""
        yield _note(
            "--speculative-config",
            f"its drafter reads ahead, so vLLM drops a match unit from each hit: {match_unit} tokens{coarse}",
        )


def _of_step_budget(flags: Flags, layout: EngineLayout) -> Iterator[Advice]:
    budget, block = layout.max_num_batched_tokens, layout.block_size
    if not layout.has_states:
        return
    if budget < 2 * block:
        given = "" if flags.max_num_batched_tokens else ", vLLM's choice here,"
        where = "below one block" if budget < block else "less than two blocks"
        yield _warning(
            "--max-num-batched-tokens",
            f"{budget}{given} is {where} of {block} tokens: behind another prefill a request waits for a whole block. "
            f"Set --max-num-batched-tokens {2 * block} or more",
        )


def _of_retention(flags: Flags, layout: EngineLayout, tiers: Sequence[TierCapacity]) -> Iterator[Advice]:
    interval = flags.prefix_cache_retention_interval
    if interval and layout.has_states and tiers:
        megabytes = max(tier.snapshot_bytes for tier in tiers) / 1e6
        yield _warning(
            "--prefix-cache-retention-interval",
            f"a state of up to {megabytes:.1f} MB is stored every {interval} tokens, in place of what other prompts "
            "could hit: 0, the default, keeps the ends of prompts and where prompts part",
        )


def _of_memory(memory: HostMemory) -> Iterator[Advice]:
    """Half of what is free leaves the other half to the model."""
    flags, free = memory.flags, as_size(memory.free_bytes)
    if memory.tiers_bytes > memory.free_bytes:
        each = f" for each of {flags.num_engines} engines" if flags.num_engines > 1 else ""
        yield _warning(
            "--cpu",
            f"the tiers' {as_size(memory.tier_bytes)}{each} is more than the {free} of memory that are free here now, "
            "in the container or on the machine, and a server refuses to start: "
            f"{as_size(memory.free_bytes // 2 // flags.num_engines)} leaves as much for the model",
            ends_a_start=True,
        )
    elif memory.is_short:
        share, is_bytes = memory.share_that_fits, bool(flags.kv_cache_memory_bytes)
        taken = (
            f"vLLM on a CPU takes {as_size(memory.vllm_bytes)} for itself of the {free} of memory that are free here "
            f"now, and leaves less than the {as_size(memory.tiers_bytes)} of the tiers"
        )
        if memory.chosen_share is not None:
            yield _note("--gpu-memory-utilization", f"it was not given: {taken}, so the command has {share:g}")
        elif share is not None:
            remedy = "leave it out, VLLM_CPU_KVCACHE_SPACE too, or give" if is_bytes else "set"
            yield _warning(
                "--kv-cache-memory-bytes" if is_bytes else "--gpu-memory-utilization",
                f"{taken}, and a server refuses to start: {remedy} --gpu-memory-utilization {share:g}",
                ends_a_start=True,
            )
        else:
            yield _warning(
                "--cpu",
                f"{taken}, and a server refuses to start: --cpu {as_size(memory.free_bytes // 4 // flags.num_engines)} "
                "leaves room for both",
                ends_a_start=True,
            )


def _of_capacity(tiers: Sequence[TierCapacity], conversation: Conversation) -> Iterator[Advice]:
    for tier in tiers:
        if not tier.num_conversations:
            yield _warning(
                "--disk" if tier.name.endswith("disk") else "--cpu",
                f"the {tier.name} tier does not hold one conversation of {conversation.num_tokens} tokens: "
                f"give it at least {tier.size_of_one} bytes",
            )
