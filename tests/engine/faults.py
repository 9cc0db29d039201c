# SPDX-License-Identifier: Apache-2.0
"""Faults put into a running engine, to prove that the comparisons would see them. Run inside the driver's process."""

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_overlay.connector.connector import HybridOffloadConnector
from vllm_overlay.planner.objects import SNAPSHOT_KIND

if TYPE_CHECKING:
    from tests.engine.driver import Driver


def _offload_connectors(connector: Any) -> list[HybridOffloadConnector]:
    if isinstance(connector, HybridOffloadConnector):
        return [connector]
    return [found for child in getattr(connector, "sub_connectors", []) for found in _offload_connectors(child)]


def _scheduler_half(driver: "Driver", tier: str) -> Any:
    found = _offload_connectors(driver.engine_core.scheduler.connector)
    return next(connector for connector in found if connector.settings.tier == tier)._scheduler


def _worker_half(tier: str) -> Any:
    found = _offload_connectors(get_kv_transfer_group())
    return next(connector for connector in found if connector.settings.tier == tier)._worker


def wait_for_recovery(driver: "Driver") -> None:
    """Disk tiers serve while they still scan their root; tests want to see all of it."""
    deadline = time.monotonic() + 60
    for connector in _offload_connectors(driver.engine_core.scheduler.connector):
        tier = connector._scheduler._tier
        while getattr(tier, "is_recovering", False):
            tier.advance()
            time.sleep(0.01)
            if time.monotonic() > deadline:
                raise TimeoutError("the disk tier is still recovering")


def _entries(driver: "Driver", kind: str) -> list[Any]:
    """The CPU tier's visible objects of a kind, by the end of their tokens."""
    index = _scheduler_half(driver, "cpu")._tier.index
    found = [entry for entry in index._entries.values() if entry.object_id.kind == kind]
    return sorted(found, key=lambda entry: entry.end_tokens)


def _rows(entry: Any) -> Any:
    return _worker_half("cpu")._tier._pool.array, list(entry.units)


def zero_snapshot(driver: "Driver") -> int:
    """The last snapshot's bytes become zeros."""
    array, units = _rows(_entries(driver, SNAPSHOT_KIND)[-1])
    array[units] = 0
    return len(units)


def zero_chunk(driver: "Driver", position: int, kind: str = "f0") -> int:
    """One attention chunk's bytes become zeros."""
    array, units = _rows(_entries(driver, kind)[position])
    array[units] = 0
    return len(units)


def swap_chunks(driver: "Driver", position: int) -> int:
    """The chunks at one position of the two stored prompts change places.

    Two chunks of *one* prompt would not do: keys carry their positions, and attention does not care for their order.
    """
    ends = sorted({entry.end_tokens for entry in _entries(driver, "f0")})
    first, second = [entry for entry in _entries(driver, "f0") if entry.end_tokens == ends[position]]
    array, one = _rows(first)
    _, other = _rows(second)
    array[one], array[other] = array[other].copy(), array[one].copy()
    return len(one)


def copy_snapshot(driver: "Driver", source: int, target: int) -> int:
    """The snapshot that ends at ``target`` tokens gets the bytes of the one that ends at ``source``."""
    by_end = {entry.end_tokens: entry for entry in _entries(driver, SNAPSHOT_KIND)}
    array, units = _rows(by_end[target])
    array[units] = array[list(by_end[source].units)]
    return len(units)


def forget_states(driver: "Driver") -> int:
    """The device prefix cache loses its recurrent states and keeps its attention."""
    manager = driver.engine_core.scheduler.kv_cache_manager
    recurrent = {i for i, group in enumerate(manager.kv_cache_config.kv_cache_groups) if _is_recurrent(group)}
    cached = [block for block in manager.block_pool.blocks if block.block_hash is not None]
    states = {block.block_id for block in cached if get_group_id(block.block_hash) in recurrent}
    manager.evict_blocks(states)
    return len(states)


def _is_recurrent(group: Any) -> bool:
    return isinstance(group.kv_cache_spec, MambaSpec)


def retag(driver: "Driver") -> int:
    """The arena's units of the last snapshot carry another generation: what a lost race would look like."""
    entry = _entries(driver, SNAPSHOT_KIND)[-1]
    _worker_half("cpu")._tier._tags[list(entry.units)] += 1_000_000
    return len(entry.units)


def garbage_in_free_blocks(driver: "Driver") -> int:
    """Every byte of every free device block becomes 0xFF, which is NaN in all floating-point types."""
    runner = driver.engine_core.model_executor.driver_worker.worker.model_runner
    pool = driver.engine_core.scheduler.kv_cache_manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    tensors = {tensor.data_ptr(): tensor for tensor in runner.kv_caches}
    for tensor in tensors.values():
        page = torch.full_like(tensor[0], 0).view(torch.uint8)
        page.fill_(0xFF)
        for block_id in free:
            tensor[block_id].view(torch.uint8).copy_(page)
    return len(free)


def set_clearing(driver: "Driver", on: bool) -> bool:
    """Whether loads clear the rest of the pages they touch, as they must."""
    transfer = _worker_half("cpu")._transfer
    if on:
        del transfer.zero
    else:
        transfer.zero = lambda spans: None
    return on


def set_loads_broken(driver: "Driver", on: bool) -> bool:
    """Every fetch of the CPU tier fails, without a fault of the object."""
    tier = _worker_half("cpu")._tier
    if not on:
        del tier.poll
        return on

    def poll() -> Any:
        stored, fetched = type(tier).poll(tier)
        broken = [dataclasses.replace(result, buffer=None, reason="injected", is_bad=False) for result in fetched]
        return stored, broken

    tier.poll = poll
    return on


def set_loads_silent(driver: "Driver", on: bool) -> bool:
    """Fetches of the CPU tier never end, and the patience with them is short."""
    worker = _worker_half("cpu")
    if not on:
        del worker._tier.poll
        worker._load_timeout_s = 30.0
        return on
    worker._tier.poll = lambda: (type(worker._tier).poll(worker._tier)[0], [])
    worker._load_timeout_s = 0.05
    return on


def set_hook_broken(driver: "Driver", half: str, hook: str, on: bool) -> bool:
    """A method of the scheduler's or the worker's half raises."""
    target = _scheduler_half(driver, "cpu") if half == "scheduler" else _worker_half("cpu")
    if not on:
        delattr(target, hook)
        return on

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"injected into {hook}")

    setattr(target, hook, broken)
    return on


def set_gather_broken(driver: "Driver", on: bool) -> bool:
    """Copies out of the KV cache raise."""
    transfer = _worker_half("cpu")._transfer
    if not on:
        del transfer.gather
        return on

    def gather(*_: Any) -> None:
        raise RuntimeError("injected into gather")

    transfer.gather = gather
    return on
