# SPDX-License-Identifier: Apache-2.0
"""A question becomes a plan: the layout of the engine, what each tier holds, what to mind, and the command."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_overlay.config import ConfigError
from vllm_overlay.planner.geometry import check_groups, finer_match_unit
from vllm_overlay.planning.advice import Advice, Severity, advice
from vllm_overlay.planning.ask_vllm import ask_vllm
from vllm_overlay.planning.capacity import Conversation, TierCapacity, geometry_of, tier_capacity
from vllm_overlay.planning.question import EngineLayout, Question
from vllm_overlay.planning.server_command import server_command, transfer_config
from vllm_overlay.tiers.factory import tier_spec
from vllm_overlay.tiers.memory import available_memory

HOST = "host"
"""The ``hit_source`` of a tier in the host's memory."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it is plain data. ``command`` is what to run, argument by argument."""

    question: Question
    layout: EngineLayout
    match_unit: int
    conversation: Conversation
    tiers: tuple[TierCapacity, ...]
    advice: tuple[Advice, ...]
    kv_transfer_config: Mapping[str, Any]
    command: tuple[str, ...]

    @property
    def has_warnings(self) -> bool:
        return any(item.severity is Severity.WARNING for item in self.advice)


def make_plan(question: Question, children: Sequence[Mapping[str, Any]], conversation: Conversation) -> Plan:
    """``children``: the ``kv_connector_extra_config`` of each tier, in order. Takes as long as an import of vLLM.

    Raises:
        ConfigError: no engine can have these settings; the sentence is the connector's where it would say one.
        GeometryError: the same, of the sizes of blocks and chunks.
    """
    if not children:
        raise ConfigError("there is no tier to plan: give --cpu 32GiB, --disk /mnt/kv:1TiB or both")
    specs = [tier_spec(child) for child in children]
    layout = ask_vllm(question)
    match_unit = choose_match_unit(question, layout)
    check_retention(question, layout)
    tiers = [
        capacity
        for spec in specs
        if (capacity := tier_capacity(spec, geometry_of(layout, match_unit, spec), question.world_size, conversation))
    ]
    config = transfer_config(children)
    return Plan(
        question=question,
        layout=layout,
        match_unit=match_unit,
        conversation=conversation,
        tiers=tuple(tiers),
        advice=tuple(
            advice(
                question,
                layout,
                match_unit,
                tiers,
                conversation,
                outlives_engine=any(spec.outlives_engine for spec in specs),
                host_bytes=sum(spec.settings.capacity_bytes for spec in specs if spec.hit_source == HOST),
                free_bytes=available_memory(),
            )
        ),
        kv_transfer_config=config,
        command=tuple(server_command(question.model, _flags(question, layout, match_unit), config)),
    )


def choose_match_unit(question: Question, layout: EngineLayout) -> int:
    """What was asked for, else the one to recommend. Raises GeometryError, or ConfigError where vLLM takes none."""
    default = layout.default_match_unit
    unit = question.prefix_match_unit
    if unit is None:
        return min(default, finer_match_unit(layout.groups)) if layout.takes_match_unit else default
    check_groups(layout.groups, unit)
    if not layout.takes_match_unit and unit != default:
        raise ConfigError(
            f"--prefix-match-unit {unit} must be the block size, {default}, because the model has a single KV cache "
            f"group: leave it out, and set --block-size {unit}"
        )
    return unit


def check_retention(question: Question, layout: EngineLayout) -> None:
    """vLLM refuses an interval between blocks. Raises ConfigError."""
    interval = question.prefix_cache_retention_interval
    if interval and interval % layout.block_size:
        raise ConfigError(
            f"--prefix-cache-retention-interval {interval} must be a multiple of the block size {layout.block_size}: "
            f"{max(1, interval // layout.block_size) * layout.block_size} is, and 0 is the default"
        )


def _flags(question: Question, layout: EngineLayout, match_unit: int) -> list[str]:
    flags = question.server_flags
    if question.prefix_match_unit is None and layout.takes_match_unit:
        flags += ["--prefix-match-unit", str(match_unit)]
    return flags
