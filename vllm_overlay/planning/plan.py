# SPDX-License-Identifier: Apache-2.0
"""A question becomes a plan: the layout of the engine, what each tier holds, what to mind, and the command."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_overlay.config import ConfigError
from vllm_overlay.planner.geometry import check_groups, finer_match_unit
from vllm_overlay.planning.advice import CUDA, Advice, Severity, advice
from vllm_overlay.planning.ask_vllm import ask_vllm
from vllm_overlay.planning.capacity import Conversation, TierCapacity, geometry_of, tier_capacity
from vllm_overlay.planning.host_memory import HostMemory
from vllm_overlay.planning.offloading import capacities, offloading_config, row_bytes
from vllm_overlay.planning.question import EngineLayout, Flags, Question
from vllm_overlay.planning.server_command import server_command, transfer_config
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.mounts import nearest_directory
from vllm_overlay.tiers.disk.manager import quota_of
from vllm_overlay.tiers.disk.spec import DiskTierSpec
from vllm_overlay.tiers.disk.staging import staging_size
from vllm_overlay.tiers.disk.volume import Quota, Volume
from vllm_overlay.tiers.factory import tier_spec
from vllm_overlay.tiers.memory import available_memory


@dataclass(frozen=True, slots=True)
class Plan:
    """All of it is plain data. ``command`` is what to run, argument by argument."""

    flags: Flags
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


def make_plan(
    arguments: Sequence[str],
    children: Sequence[Mapping[str, Any]],
    conversation: Conversation,
    *,
    may_fetch: bool = False,
    platform: str = "",
) -> Plan:
    """Takes as long as an import of vLLM.

    ``arguments``: of vLLM's server, ``--model`` among them. ``children``: the ``kv_connector_extra_config`` of each
    tier, in order; there is one. ``may_fetch``: whether vLLM may load the model's configuration from where it would.
    ``platform``: "cuda" plans vLLM's own copies over our disk tier.

    Raises:
        ConfigError: no engine can have these settings; the sentence is the connector's where it would say one.
        GeometryError: the same, of the sizes of blocks and chunks.
    """
    specs = [tier_spec(child) for child in children]
    config = offloading_config(children) if platform == CUDA else transfer_config(children)
    reply = ask_vllm(Question(arguments=tuple(arguments), kv_transfer_config=config, may_fetch=may_fetch))
    flags, layout = reply.flags, reply.layout
    match_unit = choose_match_unit(flags, layout)
    check_retention(flags, layout)
    cut = [(spec, geometry_of(layout, match_unit, spec)) for spec in specs]
    conversation = replace(conversation, retention_interval=flags.prefix_cache_retention_interval or 0)
    ranks, step_tokens = flags.tensor_parallel_size, layout.max_num_batched_tokens
    tiers = [
        capacity
        for spec, geometry in cut
        if (capacity := tier_capacity(spec, geometry, ranks, step_tokens, conversation))
    ]
    disks = [
        (spec, quota_of(spec.settings, geometry.largest_object_bytes, ranks))
        for spec, geometry in cut
        if isinstance(spec, DiskTierSpec)
    ]
    host_bytes = sum(spec.host_bytes(geometry, ranks, step_tokens) for spec, geometry in cut)
    if platform == CUDA:
        num_bytes = row_bytes(layout, ranks)
        (disk,) = (spec for spec in specs if isinstance(spec, DiskTierSpec))
        cpu_bytes = config["kv_connector_extra_config"]["cpu_bytes_to_use"]
        tiers = capacities(layout, num_bytes, cpu_bytes, disk, conversation, match_unit)
        disks = [(disk, quota_of(disk.settings, num_bytes, 1))]
        host_bytes = cpu_bytes + staging_size(disk.settings.staging_bytes)
        layout = replace(layout, node_bytes=0)
    shortages = [said for spec, quota in disks if (said := _shortage(spec.settings.root, quota))]
    memory = HostMemory(flags, layout, host_bytes, available_memory())
    return Plan(
        flags=flags,
        layout=layout,
        match_unit=match_unit,
        conversation=conversation,
        tiers=tuple(tiers),
        advice=tuple(advice(flags, layout, match_unit, tiers, conversation, memory, shortages, platform)),
        kv_transfer_config=config,
        command=tuple(
            server_command(
                arguments, flags, match_unit if layout.takes_match_unit else None, memory.chosen_share, config
            )
        ),
    )


def _shortage(root: str, quota: Quota) -> str:
    total, free = volume_bytes(root)
    return Volume(free).shortage(quota, root, total)


def volume_bytes(root: str) -> tuple[int, int]:
    """What the file system of ``root`` has, and what is free. ``root`` need not be there yet.

    Where it is, all counts as free: what of it is the root's is not known.
    """
    device, where = Device(), nearest_directory(root)
    total = device.total_bytes(where)
    return total, total if os.path.isdir(root) else device.free_bytes(where)


def choose_match_unit(flags: Flags, layout: EngineLayout) -> int:
    """What was asked for, else the one to recommend. Raises GeometryError, or ConfigError where vLLM takes none."""
    default = layout.default_match_unit
    unit = flags.prefix_match_unit
    if unit is None:
        return min(default, finer_match_unit(layout.groups)) if layout.takes_match_unit else default
    check_groups(layout.groups, unit)
    if not layout.takes_match_unit and unit != default:
        raise ConfigError(
            f"--prefix-match-unit {unit} must be the block size, {default}, because the model has a single KV cache "
            f"group: leave it out, and set --block-size {unit}"
        )
    return unit


def check_retention(flags: Flags, layout: EngineLayout) -> None:
    """vLLM refuses an interval between blocks. Raises ConfigError."""
    interval = flags.prefix_cache_retention_interval
    if interval and interval % layout.block_size:
        raise ConfigError(
            f"--prefix-cache-retention-interval {interval} must be a multiple of the block size {layout.block_size}: "
            f"{max(1, interval // layout.block_size) * layout.block_size} is, and 0 is the default"
        )
