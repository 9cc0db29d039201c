# SPDX-License-Identifier: Apache-2.0
"""What the disk tier's halves keep to themselves. Only here do tests read or set it."""

from pathlib import Path

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.disk.device import Device
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.namespace import DiskNamespace
from vllm_overlay.tiers.disk.worker import DiskTierWorker

# The index half.


def lease_bytes(tier: DiskTierManager) -> int:
    """Bytes of the lease that no store has taken."""
    return tier._reclaimer._lease.available


def stores_in_flight_bytes(tier: DiskTierManager) -> int:
    """Bytes of the lease that stores have taken and not used yet."""
    return tier._reclaimer._lease.in_flight


def spare_files(tier: DiskTierManager) -> list[Path]:
    """Files that wait to be written over."""
    return sorted(Path(path) for spare in tier._reclaimer._lease.recycled() for path in spare.paths)


def served_namespace(tier: DiskTierManager) -> DiskNamespace | None:
    """The namespace that the reclaimer has joined."""
    return tier._reclaimer._membership.namespace


def is_member(tier: DiskTierManager) -> bool:
    """Whether the process has a slot in the ledger of the root that is there now."""
    membership = tier._reclaimer._membership
    return membership.slot is not None and not membership.is_lost()


def is_removing(tier: DiskTierManager, object_id: ObjectId) -> bool:
    """Whether the object's files are yet to be unlinked."""
    return tier._reclaimer.is_removing(object_id)


def reset_name(tier: DiskTierManager) -> str:
    """Names the last reset; empty before the first."""
    return tier._reset


def is_scanning(tier: DiskTierManager) -> bool:
    """Whether recovery still lists files."""
    return tier._recovery._is_scanning


def num_pending_lookups(tier: DiskTierManager) -> int:
    """Prompts that the lookup thread has yet to answer."""
    return tier._async_lookup._num_pending


def begin_closing(tier: DiskTierManager) -> None:
    """The reclaimer takes nothing back any more."""
    tier._reclaimer._is_closing = True


# The byte half.


def free_staging_units(worker: DiskTierWorker) -> int:
    with worker._lock:
        return worker._staging._free.num_free


def num_fetched(worker: DiskTierWorker) -> int:
    """Results that wait for ``poll``."""
    return len(worker._fetched)


def put_device(worker: DiskTierWorker, device: Device) -> None:
    worker._device = device


def stop_readers(worker: DiskTierWorker, timeout_s: float) -> None:
    worker._readers.stop(timeout_s)


def mark_closed(worker: DiskTierWorker) -> None:
    worker._is_closed = True


def is_writing(worker: DiskTierWorker) -> bool:
    """Whether a write thread runs."""
    return any(thread.is_alive() for thread in worker._writers._threads)


def is_short(tier: DiskTierManager) -> bool:
    """Whether the tier is about to evict."""
    return tier._reclaimer.short_bytes > 0


def has_found_all_and_is_short(tier: DiskTierManager) -> bool:
    """Whether a scan has ended that the scheduler has taken nothing of yet, and there is too little room."""
    return not tier._recovery._is_scanning and len(tier.index) == 0 and is_short(tier)
