# SPDX-License-Identifier: Apache-2.0
"""Puts a connector's halves together at start: geometry, tier, transfer, and the lines the log gets."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vllm_overlay.common.log_summary import in_bytes
from vllm_overlay.config import ConfigError, TierSettings, parse_bytes
from vllm_overlay.connector.fingerprint import compute_fingerprints
from vllm_overlay.connector.kv_cache_groups import cell_facts, group_tensors, page_facts, planner_groups
from vllm_overlay.connector.lookahead import lookahead_units
from vllm_overlay.connector.lora.digests import loaded_adapters
from vllm_overlay.connector.metadata import OffloadHandshake
from vllm_overlay.connector.scheduler import OffloadScheduler
from vllm_overlay.connector.worker import OffloadWorker
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tally import Tally
from vllm_overlay.tiers.base import TierSpec, WorkerContext
from vllm_overlay.tiers.memory import Bytes
from vllm_overlay.transfer.base import KVTransfer
from vllm_overlay.transfer.factory import build_transfer
from vllm_overlay.transfer.group_tensors import GroupTensors
from vllm_overlay.transfer.self_check import TransferError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

NEW_ON_GPUS = (
    "copies on a GPU are new: they were tried on one H100 with tiny models. Before you serve with them run "
    "tools/gpu_smoke.py and vllm-overlay verify (docs/gpu.md)"
)
"""Logged once at start on a GPU. docs/gpu.md and the README say the same."""

AUTO_SPECULATIVE_TOKENS = 8192
AUTO_SPECULATIVE_STATES = 512
"""What ``speculative_snapshot_tokens`` "auto" stands for: the distance of such snapshots, and the states for which a
tier must have room. In smaller tiers, and with an order by recency, such snapshots cost hits (docs/eviction.md)."""


def build_worker(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    spec: TierSpec[Any],
    tally: Tally,
    kv_caches: dict[str, torch.Tensor],
) -> tuple[OffloadWorker, OffloadHandshake]:
    """Makes the worker's half, and what it tells the scheduler's. Raises ConfigError or GeometryError."""
    _ask_for_amx()
    settings = spec.settings
    match_unit = kv_cache_config.hash_block_size
    tensors = group_tensors(vllm_config, kv_cache_config, kv_caches, match_unit)
    geometry = Geometry.build(
        planner_groups(kv_cache_config, tensors), match_unit, settings.hybrid_chunk_size, spec.auto_object_bytes
    )
    parallel = vllm_config.parallel_config
    rank = parallel.rank % parallel.world_size
    if rank == 0:
        logger.info("%s", start_line(settings.name, geometry, parallel.world_size, spec.capacity_bytes))
    facts = page_facts(vllm_config, kv_cache_config, tensors)
    cells = cell_facts(vllm_config, kv_cache_config, tensors)
    fingerprints = partial(compute_fingerprints, vllm_config, kv_cache_config, geometry, facts, cells)
    step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    tier, part = spec.build_worker(WorkerContext(geometry, rank, parallel.world_size, step_tokens, fingerprints))
    worker = OffloadWorker(
        _transfer(settings, tensors, tier.host_memory(), is_first_rank=rank == 0),
        tier,
        loaded_adapters(vllm_config),
        load_timeout_s=settings.load_timeout_s,
        tally=tally,
    )
    return worker, OffloadHandshake(geometry, part)


def _ask_for_amx() -> None:
    """Permission to use the processor's AMX tiles. Linux gives it to a process that asks.

    vLLM 0.32.0's kernels for experts use tiles without asking. Usually oneDNN has asked before, in the first larger
    product. After a restore there may be no such product. The engine then ended with an illegal instruction.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def _transfer(
    settings: TierSettings, tensors: dict[int, GroupTensors], host_memory: Sequence[Bytes], *, is_first_rank: bool
) -> KVTransfer:
    device = tensors[0].layers[0].device
    if device.type != "cpu" and is_first_rank:
        logger.warning("%s: %s", settings.name, NEW_ON_GPUS)
    try:
        return build_transfer(tensors, host_memory, parse_bytes(settings.device_buffer_bytes, "device_buffer_bytes"))
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{settings.name}: {device} has no room left for device_buffer_bytes={settings.device_buffer_bytes!r}: "
            "lower it, or --gpu-memory-utilization"
        ) from error
    except TransferError as error:
        raise ConfigError(f"{settings.name}: copies to and from {device} do not work: {error}") from error


def build_scheduler(
    vllm_config: "VllmConfig", spec: TierSpec[Any], tally: Tally, handshakes: Sequence[OffloadHandshake]
) -> OffloadScheduler:
    """Makes the scheduler's half. Raises ConfigError when the ranks do not agree on what an object is."""
    settings = spec.settings
    first = handshakes[0]
    world_size = vllm_config.parallel_config.world_size
    if len(handshakes) != world_size:
        raise ConfigError(
            f"{settings.name}: only {len(handshakes)} of {world_size} workers told the layout of their KV cache"
        )
    if any(handshake != first for handshake in handshakes):
        raise ConfigError(f"{settings.name}: the ranks' KV caches differ in layout, so they cannot share objects")
    return OffloadScheduler(
        first.geometry,
        spec.build_manager(
            first.geometry, world_size, vllm_config.scheduler_config.max_num_batched_tokens, first.tier_part
        ),
        world_size,
        settings,
        tally,
        speculative_snapshot_tokens=speculative_snapshot_tokens(spec, first.geometry, world_size),
        num_concurrent_steps=vllm_config.max_concurrent_batches,
        lookahead_units=lookahead_units(vllm_config, first.geometry.match_unit),
    )


def speculative_snapshot_tokens(spec: TierSpec[Any], geometry: Geometry, world_size: int) -> int:
    """What that setting means for one tier. 0: no such snapshots."""
    settings: TierSettings = spec.settings
    tokens = settings.speculative_snapshot_tokens
    if tokens != "auto":
        return tokens
    is_large = (spec.capacity_bytes or 0) >= AUTO_SPECULATIVE_STATES * geometry.state_bytes * world_size
    return AUTO_SPECULATIVE_TOKENS if spec.learns and is_large else 0


def start_line(name: str, geometry: Geometry, world_size: int, capacity_bytes: int | None) -> str:
    """What the log says of a tier at start: its configuration, and what follows from it for this model. ``name`` is the
    connector's. ``capacity_bytes`` is of all ranks, and None when the tier does not say."""
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
