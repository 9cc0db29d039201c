# SPDX-License-Identifier: Apache-2.0
"""Puts a connector's halves together at start: geometry, tier, transfer, and the lines the log gets."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vllm_overlay.config import ConfigError, parse_bytes
from vllm_overlay.connector.fingerprint import compute_fingerprints
from vllm_overlay.connector.kv_cache_groups import cell_facts, group_tensors, page_facts, planner_groups
from vllm_overlay.connector.lora.digests import loaded_adapters
from vllm_overlay.connector.metadata import OffloadHandshake
from vllm_overlay.connector.metrics import OffloadStats
from vllm_overlay.connector.scheduler import OffloadScheduler
from vllm_overlay.connector.start_line import start_line
from vllm_overlay.connector.worker import OffloadWorker
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tiers.base import TierSpec, WorkerContext
from vllm_overlay.transfer.factory import build_transfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


def build_worker(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    spec: TierSpec[Any],
    stats: OffloadStats,
    kv_caches: dict[str, torch.Tensor],
) -> tuple[OffloadWorker, OffloadHandshake]:
    """The worker's half and what it tells the scheduler's. Raises ConfigError or GeometryError."""
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
    tier, part = spec.build_worker(WorkerContext(geometry, rank, parallel.world_size, fingerprints))
    worker = OffloadWorker(
        build_transfer(tensors, tier.host_memory(), parse_bytes(settings.device_buffer_bytes, "device_buffer_bytes")),
        tier,
        loaded_adapters(vllm_config),
        load_timeout_s=settings.load_timeout_s,
        stats=stats,
    )
    return worker, OffloadHandshake(rank, geometry, part)


def build_scheduler(
    vllm_config: "VllmConfig", spec: TierSpec[Any], stats: OffloadStats, handshakes: Sequence[OffloadHandshake]
) -> OffloadScheduler:
    """The scheduler's half. Raises ConfigError when the ranks do not agree on what an object is."""
    settings = spec.settings
    first = handshakes[0]
    world_size = vllm_config.parallel_config.world_size
    if len(handshakes) != world_size:
        raise ConfigError(f"{settings.name}: {len(handshakes)} of {world_size} workers told how their KV cache lies")
    if any(replace(handshake, rank=first.rank) != first for handshake in handshakes):
        raise ConfigError(f"{settings.name}: the ranks' KV caches differ in layout, so they cannot share objects")
    return OffloadScheduler(
        first.geometry,
        spec.build_manager(first.geometry, world_size, first.tier_part),
        world_size,
        store_decoded_tokens=settings.store_decoded_tokens,
        max_load_attempts=settings.max_load_attempts,
        report_timeout_s=settings.report_timeout_s,
        num_concurrent_steps=vllm_config.max_concurrent_batches,
        stats=stats,
    )
