# SPDX-License-Identifier: Apache-2.0
"""``"tier": "disk"``: how the disk tier's halves are built. Its part of the handshake is its namespace."""

import os
from pathlib import Path
from typing import Any

import msgspec

from vllm_overlay import versions
from vllm_overlay.config import MIB, ConfigError, parse_bytes
from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tiers.base import TierRoom, TierSpec, WorkerContext
from vllm_overlay.tiers.disk.catalogue import HELD_PARTS
from vllm_overlay.tiers.disk.files.checksum import integrity_of
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.namespace import INTEGRITY, OBJECT_FORMAT, DiskNamespace
from vllm_overlay.tiers.disk.files.root import open_root
from vllm_overlay.tiers.disk.manager import DiskTierManager, bytes_on_disk, quota_of
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.disk.staging import staging_size
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.memory import PAGE_BYTES, unit_size
from vllm_overlay.tiers.policies.factory import learns


class DiskTierSpec(TierSpec[DiskTierSettings]):
    """See ``TierSpec``."""

    settings_type = DiskTierSettings
    hit_source = "disk"
    auto_object_bytes = 4 * MIB
    outlives_engine = True

    def __init__(self, settings: DiskTierSettings) -> None:
        """Raises ConfigError for an eviction policy that other processes of the root may not have."""
        super().__init__(settings)
        if settings.eviction_policy not in ("auto", "learned", "lru"):
            raise ConfigError(
                f"eviction_policy={settings.eviction_policy!r} of the disk tier cannot work: all processes of its root "
                'evict in one order: set it to "learned" or "lru"'
            )

    @property
    def capacity_bytes(self) -> int:
        return parse_bytes(self.settings.capacity_bytes, "capacity_bytes")

    @property
    def learns(self) -> bool:
        return learns(self.settings.eviction_policy)

    def exclusive(self) -> dict[str, str]:
        return {"root": os.path.realpath(self.settings.root)}

    def build_worker(self, context: WorkerContext) -> tuple[DiskTierWorker, DiskNamespace]:
        settings, geometry = self.settings, context.geometry
        integrity = integrity_of(settings.encryption_key_file)
        open_root(Device(), settings.root)
        facts = {INTEGRITY: integrity.name, OBJECT_FORMAT: versions.DISK_OBJECT}
        fingerprints = context.fingerprints(settings.namespace, Path(settings.root), facts)
        namespace = DiskNamespace(fingerprints.attention, fingerprints.snapshot, fingerprints.description)
        unit_bytes = -(-unit_size(geometry.smallest_object_bytes) // PAGE_BYTES) * PAGE_BYTES
        staging_bytes = self.host_bytes(geometry, 1, context.step_tokens)
        settings = msgspec.structs.replace(settings, staging_bytes=staging_bytes)
        worker = DiskTierWorker(
            settings, namespace, context.rank, context.world_size, unit_bytes, geometry.largest_object_bytes
        )
        return worker, namespace

    def build_manager(self, geometry: Geometry, world_size: int, step_tokens: int, part: Any) -> DiskTierManager:
        assert isinstance(part, DiskNamespace)
        largest, step_bytes = geometry.largest_object_bytes, _step_bytes(geometry, step_tokens)
        return DiskTierManager(self.settings, part, world_size, largest, geometry=geometry, step_bytes=step_bytes)

    def room(self, geometry: Geometry, world_size: int, step_tokens: int) -> TierRoom:
        return room_of(self.settings, geometry.largest_object_bytes, world_size, _step_bytes(geometry, step_tokens))

    def host_bytes(self, geometry: Geometry, world_size: int, step_tokens: int) -> int:
        return world_size * staging_size(self.settings.staging_bytes, _step_bytes(geometry, step_tokens))


def _step_bytes(geometry: Geometry, step_tokens: int) -> int:
    """What a full step stores in one rank: chunks, and a prompt's state."""
    return int(step_tokens * geometry.token_bytes) + geometry.max_snapshot_bytes


def room_of(settings: DiskTierSettings, max_object_bytes: int, world_size: int, step_bytes: int = 0) -> TierRoom:
    """Bytes that objects may take, without what is set aside for objects that are being written."""
    quota = quota_of(settings, max_object_bytes, world_size, step_bytes)
    capacity = quota.capacity_bytes
    held = max(capacity // HELD_PARTS, quota.largest_bytes, quota.at_once_bytes(capacity, 1))
    return TierRoom(quota.capacity_bytes - held, lambda num_bytes: bytes_on_disk(num_bytes, world_size), held)
