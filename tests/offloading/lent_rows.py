# SPDX-License-Identifier: Apache-2.0
"""A HybridDiskTier over rows of its own, without an engine: jobs as vLLM's TieringOffloadingManager submits them."""

import mmap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from tests.tiers.disk.devices import GatedDevice
from tests.waiting import until
from vllm_overlay.offloading import tier as module
from vllm_overlay.offloading.tier import HybridDiskTier
from vllm_overlay.tiers.disk.files.namespace import DiskNamespace
from vllm_overlay.tiers.memory import PAGE_BYTES

ROW_BYTES = 2 * PAGE_BYTES
NUM_ROWS = 32
_REQUEST = ReqContext("request")
_STEP = ScheduleEndContext((), ())


def keys(count: int, name: str = "prompt", group: int = 0) -> list[OffloadKey]:
    """Of a prompt's chunks, as vLLM's block hashes are: 32 bytes each, and the group."""
    return [make_offload_key(f"{name} {place}".encode().ljust(32, b"."), group) for place in range(count)]


def alone() -> None:
    """In a process that has no engine: tiers of one namespace."""
    module.engine_being_built = lambda: None  # type: ignore[assignment, return-value]
    module.namespace_of = lambda *_: DiskNamespace("ab" * 32, "ab" * 32, {"model": "tiny"})


class LentRows:
    """The tier, and the rows that it copies from and to. Settings are those of the tier in ``secondary_tiers``."""

    row_bytes = ROW_BYTES

    def __init__(self, root: str, **settings: Any) -> None:
        self.memory = mmap.mmap(-1, NUM_ROWS * ROW_BYTES)
        self.rows = np.frombuffer(self.memory, dtype=np.uint8).reshape(NUM_ROWS, ROW_BYTES)
        config = SimpleNamespace(groups=(SimpleNamespace(tokens_per_block=64),) * 2)
        spec: Any = SimpleNamespace(config=config, blocks_per_chunk=1)
        given = {"root": root, "capacity_bytes": "8 MiB", "min_free_bytes": 0, **settings}
        self.tier = HybridDiskTier(spec, memoryview(self.rows), "hybrid_disk", **given)
        self._num_jobs = 0
        self._is_shut_down = False

    def gate(self, call: str) -> GatedDevice:
        """From here on these calls of the tier's threads on objects wait for the test."""
        device = self.tier._worker._device = GatedDevice(call)
        return device

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self.tier.shutdown()

    def fill(self, rows: Sequence[int], value: int = 0) -> None:
        """Each row with bytes of its own."""
        for row in rows:
            self.rows[row] = (np.arange(ROW_BYTES) * (row + 3) + value) % 251

    def store(self, names: Sequence[OffloadKey], rows: Sequence[int]) -> JobResult:
        return self.result(self.submit(names, rows, is_load=False))

    def load(self, names: Sequence[OffloadKey], rows: Sequence[int]) -> JobResult:
        return self.result(self.submit(names, rows, is_load=True))

    def submit(self, names: Sequence[OffloadKey], rows: Sequence[int], *, is_load: bool) -> int:
        self._num_jobs += 1
        job = TransferJob(self._num_jobs, names, np.array(rows, dtype=np.int32), is_load, _REQUEST)
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        return self._num_jobs

    def result(self, job_id: int) -> JobResult:
        """Steps until the job has ended. No other one may be under way."""
        found = until(self.step, f"job {job_id}")
        assert [one.job_id for one in found] == [job_id]
        return found[0]

    def step(self) -> list[JobResult]:
        found = list(self.tier.get_finished_jobs())
        self.tier.on_schedule_end(_STEP)
        return found

    def has(self, key: OffloadKey) -> bool:
        self.tier.on_schedule_end(_STEP)
        answer = self.tier.lookup(key, _REQUEST)
        assert answer in (LookupResult.HIT, LookupResult.MISS)
        return answer is LookupResult.HIT
