# SPDX-License-Identifier: Apache-2.0
"""Faults put into a running engine, to prove that the comparisons would see them. Run inside the driver's process."""

import errno
import fcntl
import os
import resource
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import MambaSpec

from tests.engine.halves import scheduler_half, tier_manager, tier_managers, tier_worker, transfer_of, worker_half
from tests.tiers.disk.inside import room_bytes
from tests.tiers.entries import entries_of
from tests.waiting import until
from vllm_overlay.common.circuit_breaker import CircuitBreaker
from vllm_overlay.planner.objects import SNAPSHOT_TAG
from vllm_overlay.tiers.disk.catalogue import errors
from vllm_overlay.tiers.disk.catalogue.connection import Connection
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.manager import DiskTierManager

if TYPE_CHECKING:
    from tests.engine.driver import Driver


def wait_for_recovery(driver: "Driver") -> None:
    """Disk tiers serve while they still scan their root and have no room yet; tests want to see and store all."""
    for tier in tier_managers(driver):
        if isinstance(tier, DiskTierManager):
            until(
                lambda tier=tier: tier.advance() or (not tier.is_recovering and room_bytes(tier)),
                "the end of the disk tier's recovery, and its room",
            )


def _entries(driver: "Driver", kind: str) -> list[Any]:
    """The CPU tier's visible objects of a kind, by the end of their tokens."""
    entries = entries_of(tier_manager(driver, "cpu").index)
    found = [entry for entry in entries.values() if entry.object_id.tag == kind]
    return sorted(found, key=lambda entry: entry.end_tokens)


def _rows(entry: Any) -> Any:
    return tier_worker("cpu")._pool.array, list(entry.units)


def snapshots(driver: "Driver") -> list[int]:
    """No fault: the boundaries of the CPU tier's snapshots."""
    return [entry.end_tokens for entry in _entries(driver, SNAPSHOT_TAG)]


def kinds(driver: "Driver") -> list[str]:
    """No fault: the kinds of objects in the CPU tier."""
    entries = entries_of(tier_manager(driver, "cpu").index)
    return sorted({entry.object_id.tag for entry in entries.values()})


def drop_snapshots(driver: "Driver") -> int:
    """The CPU tier loses its snapshots and keeps its attention; returns how many it had."""
    found = _entries(driver, SNAPSHOT_TAG)
    for entry in found:
        tier_manager(driver, "cpu").drop(entry.object_id)
    return len(found)


def zero(driver: "Driver", kind: str, position: int = -1) -> int:
    """The bytes of one object of a kind become zeros: of the one that ends last, unless ``position`` says otherwise."""
    array, units = _rows(_entries(driver, kind)[position])
    array[units] = 0
    return len(units)


def zero_second_half(driver: "Driver", kind: str) -> int:
    """The second half of each chunk becomes zeros: of two layers alike, all of the second; returns how many."""
    found = _entries(driver, kind)
    for entry in found:
        array, units = _rows(entry)
        content = array[units].reshape(-1)
        content[content.size // 2 :] = 0
        array[units] = content.reshape(len(units), -1)
    return len(found)


def set_state_of_a_draft_stored(driver: "Driver", on: bool) -> bool:
    """A snapshot is copied from the blocks behind those that vLLM offers: with speculative decoding they hold the
    states of drafts."""
    placer = scheduler_half(driver, "cpu")._placer
    if not on:
        vars(placer).pop("to_store", None)
        return on
    to_store = placer.to_store

    def behind(planned: Any, block_ids: Any, states: Any = None) -> Any:
        tables = {group: list(block_ids[group]) for group in states or ()}
        other = {group: tables[group][tables[group].index(block) + 1] for group, block in (states or {}).items()}
        return to_store(planned, block_ids, other or None)

    placer.to_store = behind
    return on


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
    by_end = {entry.end_tokens: entry for entry in _entries(driver, SNAPSHOT_TAG)}
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
    entry = _entries(driver, SNAPSHOT_TAG)[-1]
    tags = tier_worker("cpu")._tags
    for unit in entry.units:
        tags[unit] += 1_000_000
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
    transfer = transfer_of("cpu")
    if on:
        del transfer.scatter
    else:
        transfer.scatter = lambda placements, buffers, zeros=(): type(transfer).scatter(transfer, placements, buffers)
    return on


def set_loads_broken(driver: "Driver", on: bool) -> bool:
    """Every fetch of the CPU tier fails, without a fault of the object."""
    tier = tier_worker("cpu")
    if not on:
        del tier.poll
        return on

    def poll() -> Any:
        stored, fetched = type(tier).poll(tier)
        broken = [msgspec.structs.replace(result, buffer=None, reason="injected", is_bad=False) for result in fetched]
        return stored, broken

    tier.poll = poll
    return on


def set_loads_silent(driver: "Driver", on: bool) -> bool:
    """Fetches of the CPU tier never end, and the patience with them is short."""
    worker, tier = worker_half("cpu"), tier_worker("cpu")
    if not on:
        del tier.poll
        worker._load_timeout_s = 30.0
        return on
    tier.poll = lambda: (type(tier).poll(tier)[0], [])
    worker._load_timeout_s = 0.05
    return on


def set_hook_broken(driver: "Driver", half: str, hook: str, on: bool) -> bool:
    """A method of the scheduler's or the worker's half raises; what nobody reports meanwhile is soon written off."""
    scheduler_half(driver, "cpu")._pending._timeout_s = 2.0 if on else 120.0
    target = scheduler_half(driver, "cpu") if half == "scheduler" else worker_half("cpu")
    if not on:
        delattr(target, hook)
        return on

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"injected into {hook}")

    setattr(target, hook, broken)
    return on


def set_gather_broken(driver: "Driver", on: bool) -> bool:
    """Copies out of the KV cache raise."""
    transfer = transfer_of("cpu")
    if not on:
        del transfer.gather
        return on

    def gather(*_: Any) -> None:
        raise RuntimeError("injected into gather")

    transfer.gather = gather
    return on


# The disk tier's faults. What they replace is the class's or the module's: both halves and all their threads feel it.

_FAULTY: dict[str, Any] = {}
_NOBODY = 65534


def _replace(owner: Any, name: str, value: Any) -> None:
    _FAULTY.setdefault(f"{id(owner)} {name}", (owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _raise(owner: Any, name: str, error: str) -> int:
    number = getattr(errno, error)

    def faulty(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    _replace(owner, name, faulty)
    return number


def disk_raises(driver: "Driver", calls: list[str], error: str) -> list[int]:
    """These methods of the device raise OSError for the files of objects."""
    return [_raise(Device, call, error) for call in calls]


def disk_delays(driver: "Driver", seconds: float) -> float:
    """Every read and write takes so long; endless ones end with ``disk_works``. A breaker that opens stays open."""
    tier = tier_worker("disk")
    for breaker in (tier._read_breaker, tier._write_breaker):
        _replace(breaker._backoff, "first_s", 600.0)
    read, write = Device.preadv, Device.pwritev
    works = threading.Event()

    def late(call: Any) -> Any:
        def delayed(*arguments: Any) -> Any:
            works.wait(seconds)
            return call(*arguments)

        return delayed

    _replace(Device, "preadv", late(read))
    _replace(Device, "pwritev", late(write))
    _FAULTY["works"] = works
    return seconds


def locks_raise(driver: "Driver", error: str) -> int:
    """No file can be locked."""
    return _raise(fcntl, "flock", error)


def catalogue_raises(driver: "Driver", error: str) -> str:
    """No transaction begins."""

    def faulty(*_: Any) -> Any:
        raise getattr(errors, error)("as the test wants it")

    _replace(Connection, "_begin", faulty)
    return error


def clock_jumps(driver: "Driver", seconds: float) -> float:
    """The wall clock is that much ahead; the monotonic one is not."""
    now = time.time
    _replace(time, "time", lambda: now() + seconds)
    return seconds


def limit_resource(driver: "Driver", limit: str, value: int) -> int:
    """A real limit of this process: RLIMIT_FSIZE in bytes, or RLIMIT_NOFILE."""
    kind = getattr(resource, limit)
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    _FAULTY[limit] = (kind, before)
    return value


def lose_permission(driver: "Driver", directory: str) -> int:
    """The process may not enter the directory any more: as another user where it is root's, whom no mode stops."""
    if os.geteuid() == 0:
        os.seteuid(_NOBODY)
    else:
        os.chmod(directory, 0)
    return os.geteuid()


def disk_works(driver: "Driver", root: str) -> bool:
    """Everything is as it was; breakers are closed, so that the next fault begins anew."""
    disk_of_rank_works(driver, root)
    resume_loads(driver)
    return True


def resume_loads(driver: "Driver") -> None:
    """The scheduler's half offers the disk tier at once, whatever a rank's breaker has told it."""
    scheduler_half(driver, "disk")._loads_resume_at = 0.0


def disk_of_rank_works(driver: "Driver | None", root: str) -> bool:
    """The same for the rank in this process."""
    if os.geteuid() != os.getuid():
        os.seteuid(os.getuid())
    elif os.path.exists(root):
        os.chmod(root, 0o700)
    for fault in list(_FAULTY.values()):
        if isinstance(fault, threading.Event):
            fault.set()
        elif isinstance(fault[0], int):
            resource.setrlimit(*fault)
        else:
            setattr(*fault)
    _FAULTY.clear()
    tier = tier_worker("disk")
    tier._read_breaker, tier._write_breaker = CircuitBreaker("reads"), CircuitBreaker("writes")
    return True


def reload_adapter_during_a_load(driver: "Driver", tier: str, adapter: dict[str, Any]) -> bool:
    """An adapter is loaded in place once, after a restore of one of its requests was promised."""
    half = scheduler_half(driver, tier)

    def allocated(request: Any, block_ids: Any, num_external_tokens: int) -> None:
        type(half).allocated(half, request, block_ids, num_external_tokens)
        if num_external_tokens > 0:
            del half.allocated
            driver.load_adapter(adapter, in_place=True)

    half.allocated = allocated
    return True


def change_weights(driver: "Driver") -> int:
    """New weights in place: every token gets its neighbour's embedding."""
    runner = driver.engine_core.model_executor.driver_worker.worker.model_runner
    weight = runner.model.model.embed_tokens.weight
    with torch.inference_mode():
        weight.copy_(weight.roll(1, 0).clone())
    return int(weight.shape[0])
