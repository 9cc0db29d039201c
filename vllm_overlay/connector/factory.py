# SPDX-License-Identifier: Apache-2.0
"""Puts a connector's halves together at start: geometry, tier, transfer, and the lines the log gets."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm_overlay.config import GIB, MIB, ConfigError, CpuTierSettings, DiskTierSettings, parse_bytes
from vllm_overlay.connector.fingerprint import compute_namespace
from vllm_overlay.connector.kv_cache_groups import group_tensors, page_facts, planner_groups
from vllm_overlay.connector.lora.digests import loaded_adapters
from vllm_overlay.connector.metadata import OffloadHandshake
from vllm_overlay.connector.metrics import OffloadStats
from vllm_overlay.connector.scheduler import OffloadScheduler
from vllm_overlay.connector.worker import OffloadWorker
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tiers.base import TierManager, TierWorker
from vllm_overlay.tiers.cpu import CpuTierManager, CpuTierWorker, arena_units, check_free_memory
from vllm_overlay.tiers.disk.device import Device, open_root
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.memory import PAGE_BYTES, available_memory, unit_size
from vllm_overlay.transfer.cpu import CpuTransfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

Settings = CpuTierSettings | DiskTierSettings

_DISK_OBJECT_BYTES = 4 * MIB
"""The disk tier's ``auto`` chunk is the smallest whose object has at least this size."""


def build_worker(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    settings: Settings,
    stats: OffloadStats,
    kv_caches: dict[str, torch.Tensor],
) -> tuple[OffloadWorker, OffloadHandshake]:
    """The worker's half and what it tells the scheduler's. Raises ConfigError or GeometryError."""
    match_unit = kv_cache_config.hash_block_size
    tensors = group_tensors(vllm_config, kv_cache_config, kv_caches, match_unit)
    target_bytes = _DISK_OBJECT_BYTES if isinstance(settings, DiskTierSettings) else None
    geometry = Geometry.build(
        planner_groups(kv_cache_config, tensors), match_unit, settings.hybrid_chunk_size, target_bytes
    )
    parallel = vllm_config.parallel_config
    rank, world_size = parallel.rank % parallel.world_size, parallel.world_size
    if rank == 0:
        logger.info("%s: %s", settings.name, geometry.describe())
    tier: TierWorker
    if isinstance(settings, CpuTierSettings):
        tier, handshake = _cpu_tier_worker(settings, geometry, rank, world_size)
    else:
        facts = page_facts(vllm_config, kv_cache_config, tensors)
        open_root(Device(), settings.root)
        namespace = compute_namespace(vllm_config, kv_cache_config, settings, geometry, facts)
        unit_bytes = -(-unit_size(_smallest_object(geometry)) // PAGE_BYTES) * PAGE_BYTES
        tier = DiskTierWorker(settings, namespace, rank, world_size, unit_bytes, _largest_object(geometry))
        handshake = OffloadHandshake(rank, geometry, namespace=namespace)
    worker = OffloadWorker(
        CpuTransfer(tensors),
        tier,
        loaded_adapters(vllm_config),
        load_timeout_s=settings.load_timeout_s,
        stats=stats,
    )
    return worker, handshake


def _cpu_tier_worker(
    settings: CpuTierSettings, geometry: Geometry, rank: int, world_size: int
) -> tuple[TierWorker, OffloadHandshake]:
    capacity_bytes = parse_bytes(settings.capacity_bytes, "capacity_bytes")
    largest, unit_bytes = _largest_object(geometry), unit_size(_smallest_object(geometry))
    num_units = arena_units(capacity_bytes, world_size, unit_bytes, largest)
    check_free_memory(capacity_bytes, available_memory())
    if rank == 0:
        _log_capacity(settings, geometry, num_units * unit_bytes)
    return CpuTierWorker(num_units, unit_bytes), OffloadHandshake(rank, geometry, num_units, unit_bytes)


def _log_capacity(settings: CpuTierSettings, geometry: Geometry, rank_bytes: int) -> None:
    tokens = int(rank_bytes / geometry.token_bytes) if geometry.token_bytes else 0
    snapshots = rank_bytes // geometry.max_snapshot_bytes if geometry.max_snapshot_bytes else 0
    logger.info(
        "%s: %.2f GiB a rank hold the attention of %d tokens, or %d snapshots of at most %.1f MB, or a mix",
        settings.name,
        rank_bytes / GIB,
        tokens,
        snapshots,
        geometry.max_snapshot_bytes / 1e6,
    )


def build_scheduler(
    vllm_config: "VllmConfig", settings: Settings, stats: OffloadStats, handshakes: Sequence[OffloadHandshake]
) -> OffloadScheduler:
    """The scheduler's half. Raises ConfigError when the ranks do not agree on what an object is."""
    first = handshakes[0]
    world_size = vllm_config.parallel_config.world_size
    if len(handshakes) != world_size:
        raise ConfigError(f"{settings.name}: {len(handshakes)} of {world_size} workers told how their KV cache lies")
    if any(replace(handshake, rank=first.rank) != first for handshake in handshakes):
        raise ConfigError(f"{settings.name}: the ranks' KV caches differ in layout, so they cannot share objects")
    tier: TierManager
    if isinstance(settings, CpuTierSettings):
        tier = CpuTierManager(first.num_units, first.unit_bytes, world_size)
    else:
        assert first.namespace is not None
        tier = DiskTierManager(settings, first.namespace, world_size, _largest_object(first.geometry))
    return OffloadScheduler(
        first.geometry,
        tier,
        world_size,
        max_load_attempts=settings.max_load_attempts,
        report_timeout_s=settings.report_timeout_s,
        stats=stats,
    )


def _object_sizes(geometry: Geometry) -> list[int]:
    return [geometry.chunk_bytes(group) for group in geometry.attention]


def _smallest_object(geometry: Geometry) -> int:
    return min(_object_sizes(geometry), default=geometry.max_snapshot_bytes)


def _largest_object(geometry: Geometry) -> int:
    return max([*_object_sizes(geometry), geometry.max_snapshot_bytes])
