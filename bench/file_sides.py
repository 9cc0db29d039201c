# SPDX-License-Identifier: Apache-2.0
"""What stores and loads files of one size: the disk tier, and other tiers' file code."""

import importlib.util
import itertools
import os
import select
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch  # noqa: F401  LMCache's extension is linked against its libraries
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob

from bench.disk_lab import NAMESPACE, Driver, halves, load_tickets, reserve
from vllm_overlay.config import GIB, MIB
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.base import StoreTicket
from vllm_overlay.tiers.disk.settings import DiskTierSettings

STAGING_BYTES = 256 * MIB
WRITE_THREADS, READ_THREADS = 2, 4
_STEP_S = 0.001
"""How often the tiers below vLLM's connector are asked, which an engine does once a step."""


def _settings(directory: Path) -> dict[str, Any]:
    """Of our disk tier."""
    room = {"capacity_bytes": 64 * GIB, "min_free_bytes": 0, "staging_bytes": STAGING_BYTES}
    return {"root": str(directory.resolve()), **room, "write_threads": WRITE_THREADS, "read_threads": READ_THREADS}


class Ours:
    """The disk tier as the connector's worker drives it, without the copies to and from the KV cache."""

    def __init__(self, directory: Path, object_bytes: int, encryption_key_file: str = "") -> None:
        self.directory = directory
        settings = DiskTierSettings(**_settings(directory), encryption_key_file=encryption_key_file)
        self._object_bytes = object_bytes
        self.tier, self._worker = halves(settings, object_bytes)
        self._driver = Driver(self._worker)
        self._tickets: list[StoreTicket] = []

    def prepare(self, keys: Sequence[bytes]) -> None:
        names = (ObjectId("f0", key) for key in keys)
        self._tickets = reserve(self.tier, (PlannedObject(name, (), 0, 64, self._object_bytes, 0) for name in names))

    def store(self) -> None:
        self._driver.store(self._tickets)

    def load(self) -> None:
        self._driver.load(load_tickets(self._tickets))

    def remove(self) -> None:
        """As what nobody wants: objects would stay until they are evicted."""
        for ticket in self._tickets:
            self.tier.abort(ticket.ticket)

    def close(self) -> None:
        self._worker.close(4.0)
        self.tier.close()


class Vllm:
    """vLLM's own file-system tier: its batch calls, one batch a thread, on as many threads."""

    def __init__(self, directory: Path, object_bytes: int, memory: memoryview, direct: bool) -> None:
        from vllm.v1.kv_offload.tiering.fs import io

        self.directory = directory
        self._io, self._memory, self._object_bytes, self._direct = io, memory, object_bytes, direct
        self._writers, self._readers = ThreadPoolExecutor(WRITE_THREADS), ThreadPoolExecutor(READ_THREADS)
        self._paths: list[str] = []

    def prepare(self, keys: Sequence[bytes]) -> None:
        self._paths = [str(self.directory / key.hex()[:2] / key.hex()) for key in keys]
        for path in self._paths:
            os.makedirs(os.path.dirname(path), exist_ok=True)

    def store(self) -> None:
        self._each(self._writers, WRITE_THREADS, self._io.batch_store_block)

    def load(self) -> None:
        self._each(self._readers, READ_THREADS, self._io.batch_load_block)

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


class Tier:
    """A secondary tier of vLLM's OffloadingConnector, job by job: one of all objects. Whether ours or vLLM's."""

    def __init__(
        self, directory: Path, object_bytes: int, memory: memoryview, make: Callable[[Any, memoryview], Any]
    ) -> None:
        """``make``: the tier, for vLLM's spec and a view of rows."""
        self.directory = directory
        self._num_rows = len(memory) // object_bytes
        view = memory[: self._num_rows * object_bytes].cast("B", (self._num_rows, object_bytes))
        group = SimpleNamespace(tokens_per_block=64)
        self._tier = make(SimpleNamespace(config=SimpleNamespace(groups=(group,)), blocks_per_chunk=1), view)
        self._keys: list[bytes] = []
        self._jobs = itertools.count()

    def prepare(self, keys: Sequence[bytes]) -> None:
        """As vLLM does, which looks up what it may then store."""
        self._keys = [make_offload_key(key, 0) for key in keys]
        for key in self._keys:
            self._tier.lookup(key, ReqContext("bench"))
        self._tier.on_schedule_end(ScheduleEndContext((), ()))

    def store(self) -> None:
        self._run(self._tier.submit_store, is_load=False)

    def load(self) -> None:
        self._run(self._tier.submit_load, is_load=True)

    def _run(self, submit: Callable[[TransferJob], None], *, is_load: bool) -> None:
        rows = np.arange(len(self._keys), dtype=np.int32) % self._num_rows
        submit(TransferJob(next(self._jobs), self._keys, rows, is_load, ReqContext("bench")))
        while not (found := list(self._tier.get_finished_jobs())):
            self._tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(_STEP_S)
        if not found[0].success:
            raise RuntimeError(f"a job failed: {found}")

    def remove(self) -> None:
        for path in self.directory.rglob("*"):
            if path.suffix in (".bin", ".r0"):
                path.unlink()

    def close(self) -> None:
        self._tier.shutdown()


def hybrid_disk(directory: Path) -> Callable[[Any, memoryview], Any]:
    """Ours, without an engine to tell its namespace."""
    from vllm_overlay.offloading import tier

    vars(tier)["engine_being_built"] = lambda: None
    vars(tier)["namespace_of"] = lambda *_: NAMESPACE
    return lambda spec, view: tier.HybridDiskTier(spec, view, "hybrid_disk", **_settings(directory))


def fs_tier(directory: Path) -> Callable[[Any, memoryview], Any]:
    """vLLM's, whose names are given: its own need an engine's configuration."""
    from vllm.v1.kv_offload.tiering.fs import manager

    def make(spec: Any, view: memoryview) -> Any:
        names = SimpleNamespace(
            get_file_name=lambda key: str(directory / key.hex()[:2] / key.hex()) + ".bin",
            get_config_file_path=lambda: str(directory / "config.json"),
            get_run_config=dict,
        )
        (manager.FileMapper, before) = (SimpleNamespace(from_offloading_spec=lambda **_: names), manager.FileMapper)
        try:
            return manager.FileSystemTierManager(spec, view, "fs", str(directory), READ_THREADS, WRITE_THREADS)
        finally:
            manager.FileMapper = before

    return make


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
        self._client = module.LMCacheFSClient(str(directory), READ_THREADS, "", direct, 0)
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


Side = Ours | Vllm | Tier | LMCache
