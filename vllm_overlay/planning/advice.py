# SPDX-License-Identifier: Apache-2.0
"""What an operator should know before a start: settings that work and cost hits, exactness or room."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vllm_overlay.planner.geometry import EXACT_TOKENS, finer_match_unit
from vllm_overlay.planning.capacity import Conversation, TierCapacity
from vllm_overlay.planning.question import EngineLayout, Question


class Severity(StrEnum):
    NOTE = "note"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence that names the setting and a value that works."""

    severity: Severity
    setting: str
    sentence: str


def _warning(setting: str, sentence: str) -> Advice:
    return Advice(Severity.WARNING, setting, sentence)


def _note(setting: str, sentence: str) -> Advice:
    return Advice(Severity.NOTE, setting, sentence)


def advice(
    question: Question,
    layout: EngineLayout,
    match_unit: int,
    tiers: Sequence[TierCapacity],
    conversation: Conversation,
    outlives_engine: bool,
    host_bytes: int,
    free_bytes: int,
) -> list[Advice]:
    """All that applies, in the order of the flags.

    ``outlives_engine``: whether a restart is to find a tier's objects. ``host_bytes``: what tiers take of the host's
    memory; ``free_bytes``: what is free there.
    """
    return [
        *_of_platform(layout),
        *_of_match_unit(question, layout, match_unit),
        *_of_step_budget(question, layout),
        *_of_hash(question, outlives_engine),
        *_of_retention(question, layout, tiers),
        *_of_memory(host_bytes, free_bytes),
        *_of_capacity(tiers, conversation),
    ]


def _of_platform(layout: EngineLayout) -> Iterator[Advice]:
    if layout.platform != "cpu":
        yield _warning(
            "vLLM's platform",
            f"this version was never run on {layout.platform!r}: before you serve with it, run what docs/gpu.md says",
        )


def _of_match_unit(question: Question, layout: EngineLayout, match_unit: int) -> Iterator[Advice]:
    finer = finer_match_unit(layout.groups)
    default = layout.default_match_unit
    if layout.takes_match_unit and match_unit == default and finer < default:
        yield _warning(
            "--prefix-match-unit",
            f"hits are found at multiples of {match_unit} tokens only: set --prefix-match-unit {finer}",
        )
    elif layout.takes_match_unit and question.prefix_match_unit is None and match_unit < default:
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


def _of_step_budget(question: Question, layout: EngineLayout) -> Iterator[Advice]:
    budget, block = layout.max_num_batched_tokens, layout.block_size
    if not layout.has_states:
        return
    if budget < 2 * block:
        given = "" if question.max_num_batched_tokens else ", vLLM's choice here,"
        where = "below one block" if budget < block else "less than two blocks"
        yield _warning(
            "--max-num-batched-tokens",
            f"{budget}{given} is {where} of {block} tokens: behind another prefill a request waits for a whole block. "
            f"Set --max-num-batched-tokens {2 * block} or more",
        )


def _of_hash(question: Question, outlives_engine: bool) -> Iterator[Advice]:
    algorithm = question.prefix_caching_hash_algo
    if outlives_engine and algorithm is not None and not algorithm.startswith("sha256"):
        yield _warning(
            "--prefix-caching-hash-algo",
            f"{algorithm} is seeded at random in every process, so a disk tier is refused at start: "
            "use --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED to a fixed number",
        )


def _of_retention(question: Question, layout: EngineLayout, tiers: Sequence[TierCapacity]) -> Iterator[Advice]:
    interval = question.prefix_cache_retention_interval
    if interval and layout.has_states and tiers:
        megabytes = max(tier.snapshot_bytes for tier in tiers) / 1e6
        yield _warning(
            "--prefix-cache-retention-interval",
            f"a state of up to {megabytes:.1f} MB is stored every {interval} tokens, in place of what other prompts "
            "could hit: 0, the default, keeps the ends of prompts and where prompts part",
        )


def _of_memory(host_bytes: int, free_bytes: int) -> Iterator[Advice]:
    if host_bytes > free_bytes:
        yield _warning(
            "capacity_bytes",
            f"{host_bytes} of the CPU tier is more than the {free_bytes} bytes of memory that are free on this machine "
            "now, where a server would refuse to start",
        )


def _of_capacity(tiers: Sequence[TierCapacity], conversation: Conversation) -> Iterator[Advice]:
    for tier in tiers:
        if not tier.num_conversations:
            yield _warning(
                "capacity_bytes",
                f"the {tier.name} tier does not hold one conversation of {conversation.num_tokens} tokens: "
                f"give it at least {tier.conversation_bytes} bytes",
            )
