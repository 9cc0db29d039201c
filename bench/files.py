# SPDX-License-Identifier: Apache-2.0
"""The disk tier's files by their size, beside raw O_DIRECT and other tiers' file code (docs/benchmarks.md)."""

import argparse
import importlib.util
import itertools
import json
import math
import os
import platform
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch  # noqa: F401  LMCache's extension is linked against its libraries

from bench import object_cpu
from bench.measure import Subject, table, take_turns
from bench.rawdisk import RawFiles, settle
from vllm_overlay.config import GIB, KIB, MIB
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import LoadTicket, StoreTicket
from vllm_overlay.tiers.disk.files.checksum import XXH3, integrity_of
from vllm_overlay.tiers.disk.files.device import Device, takes_direct_io
from vllm_overlay.tiers.disk.files.format import file_bytes
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.disk.manager import DiskTierManager
from vllm_overlay.tiers.disk.settings import DiskTierSettings
from vllm_overlay.tiers.disk.tickets import DiskLoad
from vllm_overlay.tiers.disk.worker import DiskTierWorker
from vllm_overlay.tiers.memory import HostPool, unit_size

SIZES = (256 * KIB, MIB, 4 * MIB, 64 * MIB)
_STAGING_BYTES = 256 * MIB
_WRITE_THREADS, _READ_THREADS = 2, 4
_POLL_S = 0.0001
_PAUSE_S = 0.3


class Ours:
    """The disk tier as the connector's worker drives it, without the copies to and from the KV cache."""

    def __init__(
        self,
        directory: Path,
        object_bytes: int,
        capacity_bytes: int = 64 * GIB,
        integrity_key_file: str = "",
        encryption_key_file: str = "",
    ) -> None:
        self.directory = directory
        settings = DiskTierSettings(
            root=str(directory),
            capacity_bytes=capacity_bytes,
            min_free_bytes=0,
            staging_bytes=_STAGING_BYTES,
            write_threads=_WRITE_THREADS,
            read_threads=_READ_THREADS,
            integrity_key_file=integrity_key_file,
            encryption_key_file=encryption_key_file,
        )
        namespace = DiskNamespace("a" * 64, "b" * 64, {"model": "a measurement"})
        self._object_bytes = object_bytes
        self.tier = DiskTierManager(settings, namespace, 1, object_bytes)
        self._worker = DiskTierWorker(settings, namespace, 0, 1, unit_size(object_bytes), object_bytes)
        self._tickets: list[StoreTicket] = []
        self._loads = itertools.count()

    def planned(self, key: bytes) -> PlannedObject:
        return PlannedObject(ObjectId("f0", key), (), 0, 64, self._object_bytes, 0)

    def prepare(self, keys: Sequence[bytes]) -> None:
        """Tickets; they need the reclaimer's lease, which the scheduler has ahead of its stores."""
        self._tickets = []
        for key in keys:
            while (ticket := self.tier.reserve(self.planned(key))) is None:
                self.tier.advance()
                time.sleep(_POLL_S)
            self._tickets.append(ticket)

    def store_and_commit(self, objects: Sequence[PlannedObject]) -> None:
        """Reserves as it goes, and evicts for that."""
        self._tickets = []
        waiting, num_stored = list(reversed(objects)), 0
        ready: StoreTicket | None = None
        while num_stored < len(objects):
            self.tier.advance()
            while waiting and (ready := ready or self.tier.reserve(waiting[-1])) is not None:
                if (buffer := self._worker.begin_store(ready)) is None:
                    break
                self._worker.submit_store(ready, buffer)
                self._tickets.append(ready)
                waiting.pop()
                ready = None
            stored, _ = self._worker.poll()
            for result in stored:
                if result.reason:
                    raise RuntimeError(f"a store failed: {result.reason}")
                self.tier.commit(result.ticket)
            num_stored += len(stored)
            if not stored:
                time.sleep(_POLL_S)

    def store(self) -> None:
        left, num_stored = list(reversed(self._tickets)), 0
        while num_stored < len(self._tickets):
            while left and (buffer := self._worker.begin_store(left[-1])) is not None:
                self._worker.submit_store(left.pop(), buffer)
            stored, _ = self._worker.poll()
            if any(result.reason for result in stored):
                raise RuntimeError(f"a store failed: {stored}")
            num_stored += len(stored)
            if not stored:
                time.sleep(_POLL_S)

    def load(self) -> None:
        load_id = str(next(self._loads))
        tickets = [
            LoadTicket(ticket.ticket, ticket.planned.object_id, ticket.planned.num_bytes, DiskLoad())
            for ticket in self._tickets
        ]
        self._worker.begin_load(load_id, tickets)
        num_loaded = 0
        while num_loaded < len(tickets):
            _, fetched = self._worker.poll()
            for result in fetched:
                if result.buffer is None:
                    raise RuntimeError(f"a load failed: {result.reason}")
                self._worker.end_fetch(load_id, result.position)
            num_loaded += len(fetched)
            if not fetched:
                time.sleep(_POLL_S)

    def remove(self) -> None:
        for ticket in self._tickets:
            self.tier.commit(ticket.ticket)
            self.tier.drop(ticket.planned.object_id)

    def close(self) -> None:
        self._worker.close(4.0)
        self.tier.close()


class Full:
    """The disk tier at its capacity, as it is after some time: each store evicts, and goes over what was evicted."""

    _KEPT = 3
    """Rounds' worth of objects that have room."""

    def __init__(self, directory: Path, object_bytes: int, count: int) -> None:
        capacity = self._KEPT * count * file_bytes(object_bytes)
        self._ours = Ours(directory, object_bytes, max(capacity, 8 * file_bytes(object_bytes)))
        self.directory = directory
        self._turn = 0
        self._objects: list[PlannedObject] = []
        while self._ours.tier.usage().evicted_objects < 2 * count:
            self.prepare([f"filling {self._turn} {number}".encode() for number in range(count)])
            self.store()

    def prepare(self, keys: Sequence[bytes]) -> None:
        self._turn += 1
        self._objects = [self._ours.planned(key) for key in keys]
        time.sleep(0.1)
        self._ours.tier.advance()

    def store(self) -> None:
        self._ours.store_and_commit(self._objects)

    def load(self) -> None:
        self._ours.load()

    def remove(self) -> None:
        """Eviction does."""

    def close(self) -> None:
        self._ours.close()


class Vllm:
    """vLLM's own file-system tier: its batch calls, one batch a thread, on as many threads."""

    def __init__(self, directory: Path, object_bytes: int, memory: memoryview, direct: bool) -> None:
        from vllm.v1.kv_offload.tiering.fs import io

        self.directory = directory
        self._io, self._memory, self._object_bytes, self._direct = io, memory, object_bytes, direct
        self._writers, self._readers = ThreadPoolExecutor(_WRITE_THREADS), ThreadPoolExecutor(_READ_THREADS)
        self._paths: list[str] = []

    def prepare(self, keys: Sequence[bytes]) -> None:
        self._paths = [str(self.directory / key.hex()[:2] / key.hex()) for key in keys]
        for path in self._paths:
            os.makedirs(os.path.dirname(path), exist_ok=True)

    def store(self) -> None:
        self._each(self._writers, _WRITE_THREADS, self._io.batch_store_block)

    def load(self) -> None:
        self._each(self._readers, _READ_THREADS, self._io.batch_load_block)

    def _each(self, pool: ThreadPoolExecutor, num_threads: int, call: Callable[..., object]) -> None:
        slots = len(self._memory) // self._object_bytes

        def run(place: int) -> None:
            paths = self._paths[place::num_threads]
            own = range(place, slots, num_threads)
            offsets = [own[turn % len(own)] * self._object_bytes for turn in range(len(paths))]
            call(paths, self._memory, offsets, self._object_bytes, self._direct)

        list(pool.map(run, range(num_threads)))

    def remove(self) -> None:
        for path in self._paths:
            os.unlink(path)

    def close(self) -> None:
        self._writers.shutdown()
        self._readers.shutdown()


class LMCache:
    """LMCache's native file-system client, with as many workers as we have readers."""

    def __init__(self, directory: Path, object_bytes: int, memory: memoryview, direct: bool, unpacked: Path) -> None:
        (found,) = (unpacked / "lmcache").glob("lmcache_fs.*.so")
        spec = importlib.util.spec_from_file_location("lmcache_fs", found)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._client = module.LMCacheFSClient(str(directory), _READ_THREADS, "", direct, 0)
        slots = len(memory) // object_bytes
        self._slots = [memory[place * object_bytes : (place + 1) * object_bytes] for place in range(slots)]
        self._keys: list[str] = []

    def prepare(self, keys: Sequence[bytes]) -> None:
        self._keys = [f"model@00000001@0@{key.hex()}" for key in keys]

    def store(self) -> None:
        self._run(self._client.submit_batch_set)

    def load(self) -> None:
        self._run(self._client.submit_batch_get)

    def _run(self, submit: Callable[[list[str], list[memoryview]], int]) -> None:
        buffers = [self._slots[turn % len(self._slots)] for turn in range(len(self._keys))]
        future = int(submit(self._keys, buffers))
        while True:
            select.select([self._client.event_fd()], [], [], 10.0)
            for done in self._client.drain_completions():
                if int(done[0]) == future:
                    if not done[1]:
                        raise RuntimeError(f"LMCache: {done}")
                    return

    def remove(self) -> None:
        for path in self.directory.rglob("*"):
            if path.is_file():
                path.unlink()

    def close(self) -> None:
        self._client.close()


Side = Ours | Full | Vllm | LMCache


@dataclass(frozen=True, slots=True)
class Row:
    """One tier's code with objects of one size; shares are of raw O_DIRECT in the same rounds.

    The last two are CPU microseconds an object in the thread that writes or reads it, where they were measured.
    """

    mib: float
    what: str
    store_gb_per_s: float
    store_share: float
    load_gb_per_s: float
    load_share: float
    store_cpu_us: float = math.nan
    load_cpu_us: float = math.nan


def bench_size(directory: Path, object_bytes: int, total_bytes: int, rounds: int, lmcache: Path | None) -> list[Row]:
    """All sides take turns with the same objects' sizes and numbers."""
    count = max(1, total_bytes // object_bytes)
    num_bytes = count * object_bytes
    direct = takes_direct_io(Device(), str(directory))
    pool = HostPool(_STAGING_BYTES // MIB, MIB)
    pool.array[:] = 7
    memory = pool.array.reshape(-1).data
    key_file = directory / "key"
    key_file.write_bytes(os.urandom(32))
    key_file.chmod(0o600)
    sides: dict[str, Side] = {
        "ours, XXH3": Ours(directory / "tier", object_bytes),
        "ours, XXH3, full: over evicted files": Full(directory / "full" / "kept", object_bytes, count),
        "ours, BLAKE3 with a key": Ours(directory / "keyed" / "tier", object_bytes, integrity_key_file=str(key_file)),
        "ours, AES-256-GCM": Ours(directory / "encrypted" / "tier", object_bytes, encryption_key_file=str(key_file)),
        "vLLM's fs tier, no checksum": Vllm(directory / "vllm", object_bytes, memory, direct),
    }
    if lmcache is not None:
        sides["LMCache's fs_native, no checksum"] = LMCache(
            directory / "lmcache", object_bytes, memory, direct, lmcache
        )
    raw = RawFiles(directory, memory, _WRITE_THREADS, _READ_THREADS, direct)
    rest = lambda: time.sleep(_PAUSE_S)  # noqa: E731

    def clean_raw() -> None:
        raw.remove()
        settle(directory)

    reference = [
        Subject("raw", num_bytes, lambda: raw.write(num_bytes), prepare=rest),
        Subject("raw", num_bytes, raw.read, prepare=rest, clean_up=clean_raw),
    ]
    subjects = {what: _subjects(side, num_bytes, count) for what, side in sides.items()}
    take_turns([reference, *subjects.values()], rounds)
    for side in sides.values():
        side.close()
    integrities = {
        "ours, XXH3": XXH3,
        "ours, BLAKE3 with a key": integrity_of(str(key_file)),
        "ours, AES-256-GCM": integrity_of("", str(key_file)),
    }
    cpu = {
        what: object_cpu.measure(directory / f"cpu-{number}", object_bytes, integrity, direct)
        for number, (what, integrity) in enumerate(integrities.items())
    }
    rows = [
        Row(
            object_bytes / MIB,
            what,
            store.gb_per_s,
            store.share_of(raw_store),
            load.gb_per_s,
            load.share_of(raw_load),
            *cpu.get(what, ()),
        )
        for (raw_store, raw_load) in [reference]
        for what, (store, load) in {"raw": reference, **subjects}.items()
    ]
    if lmcache is None:
        nothing = float("nan")
        rows.append(Row(object_bytes / MIB, "LMCache's fs_native: not run", nothing, nothing, nothing, nothing))
    return rows


def _subjects(side: Side, num_bytes: int, count: int) -> list[Subject]:
    turns = itertools.count()

    def prepare() -> None:
        turn = next(turns)
        side.prepare([f"{turn}-{number}".encode().rjust(32, b"\0")[::-1] for number in range(count)])
        time.sleep(_PAUSE_S)

    def clean_up() -> None:
        side.remove()
        settle(side.directory.parent)

    return [
        Subject("store", num_bytes, side.store, prepare=prepare),
        Subject("load", num_bytes, side.load, prepare=lambda: time.sleep(_PAUSE_S), clean_up=clean_up),
    ]


def _cells(row: Row) -> list[str]:
    figures = list(asdict(row).values())[2:]
    return ["" if math.isnan(figure) else f"{figure:.{2 if figure < 100 else 0}f}" for figure in figures]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.files", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less data, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--directory", type=Path, default=Path(".benchmarks"), help="on the disk to measure")
    parser.add_argument("--lmcache", type=Path, metavar="DIR", help="where an lmcache wheel is unpacked; else not run")
    options = parser.parse_args(arguments)
    total_bytes, rounds = (128 * MIB, 2) if options.quick else (256 * MIB, 7)
    options.directory.mkdir(parents=True, exist_ok=True)
    rows = []
    for object_bytes in SIZES:
        made = Path(tempfile.mkdtemp(prefix="files-", dir=options.directory))
        try:
            rows += bench_size(made, object_bytes, total_bytes, rounds, options.lmcache)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        print(f"{object_bytes / MIB} MiB done, load average {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    columns = ("object", "code", "store GB/s", "of raw", "load GB/s", "of raw", "store CPU us", "load CPU us")
    cells = [(f"{row.mib:g} MiB", row.what, *_cells(row)) for row in rows]
    print(f"{rounds} rounds of {total_bytes // MIB} MiB\n\n{table(columns, cells)}")
    if options.json:
        figures: dict[str, Any] = {"rows": [asdict(row) for row in rows], "quick": options.quick}
        figures |= {"machine": platform.platform(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
