# SPDX-License-Identifier: Apache-2.0
"""The plan for a GPU: vLLM's OffloadingConnector, whose copies run there, over our disk tier."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_overlay.config import ConfigError, parse_bytes
from vllm_overlay.planning.capacity import Conversation, TierCapacity
from vllm_overlay.planning.question import EngineLayout
from vllm_overlay.tiers.base import TierRoom
from vllm_overlay.tiers.disk.spec import DiskTierSpec, room_of

_PAGE = 4096
"""vLLM rounds a row up to so many bytes."""


def offloading_config(children: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``--kv-transfer-config`` for the sizes of ``--cpu`` and ``--disk``. Raises ConfigError unless both are there."""
    given = {child["tier"]: child for child in children}
    if set(given) != {"cpu", "disk"}:
        raise ConfigError(
            "--platform cuda needs --cpu and --disk, such as --cpu 32GiB --disk /var/cache/vllm-kv:1TiB: vLLM copies "
            "between the device and host memory, and our disk tier between that and the disk"
        )
    disk = {name: value for name, value in given["disk"].items() if name != "tier"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": parse_bytes(given["cpu"]["capacity_bytes"], "--cpu"),
            "secondary_tiers": [{"type": "hybrid_disk", **disk}],
        },
    }


def row_bytes(layout: EngineLayout, num_ranks: int) -> int:
    """vLLM cuts a prompt into rows of one size: a block of one KV cache group, all ranks together."""
    largest = max(group.page_bytes for group in layout.groups) * num_ranks
    return -(-largest // _PAGE) * _PAGE


def capacities(
    layout: EngineLayout, num_bytes: int, cpu_bytes: int, disk: DiskTierSpec, conversation: Conversation, unit: int
) -> list[TierCapacity]:
    """Of vLLM's CPU tier and of ours on the disk, in rows of ``num_bytes``. ``unit``: tokens between restore points.

    Raises ConfigError for a size that cannot work.
    """
    num_attention = sum(group.is_attention for group in layout.groups)
    rooms = {
        "vLLM's cpu": TierRoom(cpu_bytes, lambda num_bytes: num_bytes),
        "hybrid_disk": room_of(disk.settings, num_bytes, 1),
    }
    return [
        TierCapacity.of(
            name,
            room,
            [(row := room.object_bytes(num_bytes), layout.block_size)] * num_attention,
            row * (len(layout.groups) - num_attention),
            conversation,
            (layout.block_size, unit),
            f"rows of {num_bytes} bytes, one for each block of {layout.block_size} tokens of a KV cache group",
        )
        for name, room in rooms.items()
    ]
