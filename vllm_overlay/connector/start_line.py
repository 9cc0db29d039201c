# SPDX-License-Identifier: Apache-2.0
"""What the log says about a tier at start: its configuration, and what follows from it for this model."""

from vllm_overlay.common.log_summary import in_bytes
from vllm_overlay.planner.geometry import Geometry


def start_line(name: str, geometry: Geometry, world_size: int, capacity_bytes: int | None) -> str:
    """``name`` is the connector's. ``capacity_bytes`` is of all ranks, and None when the tier does not say."""
    blocks = " and ".join(str(size) for size in sorted({group.block_size for group in geometry.groups}))
    line = f"{name}: {geometry.describe()}; blocks of {blocks} tokens"
    if capacity_bytes is None:
        return line
    held = _held(geometry, world_size, capacity_bytes)
    return f"{line}; capacity {in_bytes(capacity_bytes)} in all ranks: {', or '.join(held)}"


def _held(geometry: Geometry, world_size: int, capacity_bytes: int) -> list[str]:
    """What fills the tier. On a disk the headers of files and their padding are left out."""
    held = []
    if geometry.token_bytes:
        held.append(f"the attention of {int(capacity_bytes / (geometry.token_bytes * world_size))} tokens")
    if geometry.recurrent:
        num_bytes = geometry.max_snapshot_bytes * world_size
        held.append(f"{capacity_bytes // num_bytes} snapshots of {in_bytes(num_bytes)}")
    return [*held, "a mix"] if len(held) > 1 else held
