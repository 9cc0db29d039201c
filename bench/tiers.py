# SPDX-License-Identifier: Apache-2.0
"""Bandwidth of the tiers beside what memory and disk give, and the cost of a lookup (docs/benchmarks.md)."""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch

from bench import model
from bench.disk_lab import NAMESPACE, Driver, load_tickets, parser, reserve, scratch
from bench.measure import Subject, table, take_turns, write_json
from bench.rawdisk import RawFiles, settle
from vllm_overlay.config import GIB, MIB
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner
from vllm_overlay.tiers.base import LoadTicket, StoreTicket, TierManager
from vllm_overlay.tiers.cpu import CpuTierManager, CpuTierWorker
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.root import choose_root, takes_direct_io
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.index import PrefixIndex
from vllm_overlay.tiers.memory import unit_size, units_needed
from vllm_overlay.transfer.cpu import CpuTransfer

_DISK_TARGET_BYTES = 4 * MIB
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a bandwidth table."""

    what: str
    store_gb_per_s: float
    store_share: float
    load_gb_per_s: float
    load_share: float

    @classmethod
    def of(cls, what: str, subjects: Sequence[Subject], references: Sequence[Subject]) -> "Row":
        """From the store and the load, and what each is compared with."""
        (store, load), (store_reference, load_reference) = subjects, references
        return cls(what, store.gb_per_s, store.share_of(store_reference), load.gb_per_s, load.share_of(load_reference))


def bench_cpu(blocks: int, rounds: int) -> list[Row]:
    """Times are the copying thread's own, so other programs on the machine do not count."""
    geometry = model.geometry()
    planner = HybridOffloadPlanner(geometry)
    keys = model.keys(blocks * model.BLOCK_TOKENS, "cpu")
    chunks = planner.store_plan(keys, {}, blocks * model.BLOCK_TOKENS)
    snapshots = _snapshots(planner, keys, -(-blocks // 4))
    unit_bytes = unit_size(chunks[0].num_bytes)
    num_units = sum(units_needed(planned.num_bytes, unit_bytes) for planned in chunks + snapshots)
    tier = CpuTierManager(num_units, unit_bytes, world_size=1)
    num_blocks = max(blocks, model.STATE_GROUPS)
    pool = CpuTierWorker(num_units, unit_bytes)
    chunk = f"chunks of {geometry.chunk_size} tokens"
    kinds = (
        (f"{chunk}, {blocks} whole blocks at once", "column_keys", chunks, len(chunks)),
        (f"{chunk}, one at a time", "column_keys", chunks, 1),
        (f"{chunk}, {blocks} whole blocks of AMX's tiles at once", "amx_tiles", chunks, len(chunks)),
        (f"{chunk}, in AMX's tiles, one at a time", "amx_tiles", chunks, 1),
        (f"snapshots of {snapshots[0].num_bytes / 1e6:.0f} MB, one at a time", "column_keys", snapshots, 1),
    )
    rows = []
    for what, layout, objects, at_once in kinds:
        driver = Driver(pool, CpuTransfer(model.kv_cache(num_blocks, layout)))
        rows.append(_cpu_row(what, objects, at_once, tier, driver, num_blocks, rounds))
    return rows


def _cpu_row(
    what: str,
    objects: list[PlannedObject],
    at_once: int,
    tier: TierManager,
    driver: Driver,
    num_blocks: int,
    rounds: int,
) -> Row:
    stores = reserve(tier, objects)
    loads = _acquire(tier, stores)
    places = model.placements(objects, num_blocks)
    steps = [slice(start, start + at_once) for start in range(0, len(objects), at_once)]
    num_bytes = sum(planned.num_bytes for planned in objects)
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    pieces = list(zip(target.chunk(len(steps)), source.chunk(len(steps)), strict=True))

    def memcpy() -> None:
        for to, come_from in pieces:
            to.copy_(come_from)

    def store() -> None:
        for step in steps:
            driver.store(stores[step], places[step])

    def load() -> None:
        for step in steps:
            driver.load(loads[step], places[step])

    reference = Subject("memcpy", num_bytes, memcpy)
    subjects = [Subject("store", num_bytes, store), Subject("load", num_bytes, load)]
    take_turns([[reference], subjects], rounds, time.thread_time)
    tier.release(loads)
    for planned in objects:
        tier.drop(planned.object_id)
    return Row.of(what, subjects, [reference, reference])


def bench_disk(directory: Path, total_bytes: int, rounds: int) -> tuple[list[Row], bool]:
    """Both rows, and whether the directory takes O_DIRECT. Every round stores under new names."""
    geometry = model.geometry(_DISK_TARGET_BYTES)
    planner = HybridOffloadPlanner(geometry)
    num_blocks = max(model.STATE_GROUPS, -(-total_bytes // (model.BLOCK_TOKENS * model.TOKEN_BYTES)))
    transfer = CpuTransfer(model.kv_cache(num_blocks))
    settings = DiskTierSettings(root=str(directory / "tier"), capacity_bytes=64 * GIB, min_free_bytes=0)
    largest = max(geometry.max_snapshot_bytes, geometry.chunk_bytes(geometry.full[0]))
    unit_bytes = unit_size(geometry.chunk_bytes(geometry.full[0]))
    tier = DiskTierManager(settings, NAMESPACE, 1, largest)
    worker = DiskTierWorker(settings, NAMESPACE, 0, 1, unit_bytes, largest)
    driver = Driver(worker, transfer)
    direct = takes_direct_io(Device(), choose_root(Device(), settings.root))
    staging = _staging_of(worker, unit_bytes)

    def chunks(name: str) -> list[PlannedObject]:
        keys = model.keys(num_blocks * model.BLOCK_TOKENS, name)
        return planner.store_plan(keys, {}, num_blocks * model.BLOCK_TOKENS)

    def snapshots(name: str) -> list[PlannedObject]:
        keys = model.keys(num_blocks * model.BLOCK_TOKENS, name)
        count = -(-total_bytes // geometry.snapshot_bytes(model.BLOCK_TOKENS))
        return _snapshots(planner, keys, count)

    try:
        rows = []
        for what, make in (
            (f"chunks of {geometry.chunk_size} tokens, {geometry.chunk_bytes(geometry.full[0]) / 1e6:.1f} MB", chunks),
            (f"snapshots of {geometry.snapshot_bytes(model.BLOCK_TOKENS) / 1e6:.0f} MB", snapshots),
        ):
            raw = RawFiles(directory, staging, settings.write_threads, settings.read_threads, direct)
            rows.append(_disk_row(what, make, tier, driver, num_blocks, directory, raw, rounds))
        return rows, direct
    finally:
        worker.close(settings.shutdown_timeout_s)
        tier.close()


def _staging_of(worker: DiskTierWorker, num_bytes: int) -> memoryview:
    """All of the worker's staging memory. It is free while nothing is stored or loaded. This warms it."""
    ticket = StoreTicket(0, PlannedObject(ObjectId("f0", b"staging"), (), 0, 0, num_bytes))
    buffer = worker.begin_store(ticket)
    assert buffer is not None
    worker.cancel_store(ticket, buffer)
    buffer.array[:] = 1
    return buffer.array.reshape(-1).data


def _disk_row(
    what: str,
    make: Callable[[str], list[PlannedObject]],
    tier: TierManager,
    driver: Driver,
    num_blocks: int,
    directory: Path,
    raw: RawFiles,
    rounds: int,
) -> Row:
    names = (f"{what} {number}" for number in itertools.count())
    objects = make("")
    places = model.placements(objects, num_blocks)
    num_bytes = sum(planned.num_bytes for planned in objects)
    stores: list[StoreTicket] = []

    def pause() -> None:
        """Disks of virtual machines save up an allowance while they rest: everyone begins with the same."""
        time.sleep(_PAUSE_S)

    def prepare() -> None:
        objects[:] = make(next(names))
        stores[:] = reserve(tier, objects)
        pause()

    def load() -> None:
        driver.load(load_tickets(stores), places)

    def remove() -> None:
        """As what nobody wants: objects would stay until they are evicted."""
        for ticket in stores:
            tier.abort(ticket.ticket)
        settle(directory)

    def remove_raw() -> None:
        raw.remove()
        settle(directory)

    raw_write = Subject("raw write", num_bytes, lambda: raw.write(num_bytes), prepare=pause)
    raw_read = Subject("raw read", num_bytes, raw.read, prepare=pause, clean_up=remove_raw)
    subjects = [
        Subject("store", num_bytes, lambda: driver.store(stores, places), prepare=prepare),
        Subject("load", num_bytes, load, prepare=pause, clean_up=remove),
    ]
    take_turns([[raw_write, raw_read], subjects], rounds)
    return Row.of(what, subjects, [raw_write, raw_read])


def _snapshots(planner: HybridOffloadPlanner, keys: list[bytes], count: int) -> list[PlannedObject]:
    """At the ends of blocks, and without the chunks below them."""
    boundaries = [(turn + 1) * model.BLOCK_TOKENS for turn in range(count)]
    return [msgspec.structs.replace(planner.snapshot(keys, boundary), parents=()) for boundary in boundaries]


def _acquire(tier: TierManager, stores: Sequence[StoreTicket]) -> list[LoadTicket]:
    """What a scheduler does once the objects are stored and a request wants them."""
    for ticket in stores:
        tier.commit(ticket.ticket)
    tickets = tier.acquire([ticket.planned for ticket in stores])
    if tickets is None:
        raise RuntimeError("an object that was stored is gone")
    return tickets


@dataclass(frozen=True, slots=True)
class LookupRow:
    """One line of the planner's table."""

    num_chunks: int
    snapshot: str
    microseconds: float
    first_microseconds: float


def bench_lookup(num_chunks: int, rounds: int) -> list[LookupRow]:
    """A prompt of which a tier has every chunk; its snapshot is at the end, near the start, or was never stored."""
    geometry = model.geometry()
    planner = HybridOffloadPlanner(geometry)
    num_tokens = num_chunks * geometry.chunk_size
    keys = model.keys(num_tokens, "lookup")
    chunks = planner.store_plan(keys, {}, num_tokens)
    rows = []
    for where, boundary in (("at the end", num_tokens), ("near the start", geometry.chunk_size), ("nowhere", 0)):
        index = PrefixIndex(capacity_bytes=None)
        for ticket, planned in enumerate(chunks):
            index.reserve(planned, ticket)
            index.commit(ticket)
            if planned.end_tokens == boundary:
                index.reserve(planner.snapshot(keys, boundary), len(chunks))
                index.commit(len(chunks))
        seconds = []
        for _ in range(rounds):
            start = time.thread_time()
            found = planner.lookup(keys, num_tokens + 1, 0, index)
            seconds.append(time.thread_time() - start)
            if found.restore_point != boundary:
                raise RuntimeError(f"the lookup found {found.restore_point} and not {boundary}")
        usual = statistics.median(seconds[1:]) * 1e6
        rows.append(LookupRow(num_chunks, where, usual, seconds[0] * 1e6))
    return rows


def _bandwidth_table(rows: Sequence[Row], reference: str) -> str:
    columns = ("what", "store GB/s", f"of {reference}", "load GB/s", f"of {reference}")
    figures = [(one.store_gb_per_s, one.store_share, one.load_gb_per_s, one.load_share) for one in rows]
    cells = ((row.what, *(f"{value:.2f}" for value in own)) for row, own in zip(rows, figures, strict=True))
    return table(columns, cells)


def _lookup_table(rows: Sequence[LookupRow]) -> str:
    columns = ("chunks", "snapshot", "microseconds", "the first time")
    times = [(f"{row.microseconds:.0f}", f"{row.first_microseconds:.0f}") for row in rows]
    cells = ((one.num_chunks, one.snapshot, *own) for one, own in zip(rows, times, strict=True))
    return table(columns, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--quick", action="store_true", help="less data, fewer rounds: seconds instead of minutes")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = made.parse_args(arguments)
    torch.set_num_threads(1)
    blocks, total_bytes, rounds = (2, 130_000_000, 3) if options.quick else (12, 500_000_000, 9)

    cpu = bench_cpu(blocks, rounds)
    print(f"CPU tier, one thread, {rounds} rounds\n\n{_bandwidth_table(cpu, 'memcpy')}\n", flush=True)
    with scratch(options.directory) as place:
        disk, direct = bench_disk(place, total_bytes, rounds)
    kind = "O_DIRECT" if direct else "no O_DIRECT here: through the page cache on both sides"
    print(f"Disk tier, {kind}, {rounds} rounds\n\n{_bandwidth_table(disk, 'raw')}\n", flush=True)
    lookups = [row for count in (1_000, 10_000, 100_000) for row in bench_lookup(count, 101)]
    print(f"Lookups of a prompt whose chunks are all there\n\n{_lookup_table(lookups)}")

    if options.json:
        figures = {"cpu": map(asdict, cpu), "disk": map(asdict, disk), "lookup": map(asdict, lookups)}
        rows = {name: list(found) for name, found in figures.items()}
        write_json(options.json, quick=options.quick, o_direct=direct, **rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
