# SPDX-License-Identifier: Apache-2.0
"""vLLM's OffloadingConnector in its tiering form, on a CPU: its worker's copies are CUDA's, so here is a small one.

``"spec_name": "CpuTiering", "spec_module_path": "tests.multi_connector.third_party"``. All else is
vLLM's own, unchanged.
"""

from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):
    """Copies whole pages between the KV cache and the region when a job is submitted; reports it when next asked."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._groups = kv_caches.group_data_refs
        self._device = [one.tensor.view(torch.int8) for one in kv_caches.tensors]
        self._host = [region.create_next_worker_view(one.page_size_bytes) for one in kv_caches.tensors]
        self._region = region
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, device_spec: GPULoadStoreSpec, host_spec: LoadStoreSpec, store: bool) -> bool:
        assert isinstance(host_spec, BlockIDsLoadStoreSpec)
        first, num_bytes = 0, 0
        for refs, size in zip(self._groups, device_spec.group_sizes, strict=True):
            blocks = torch.from_numpy(device_spec.block_ids[first : first + size]).long()
            chunks = torch.from_numpy(host_spec.block_ids[first : first + size]).long()
            for ref in refs:
                device = self._device[ref.tensor_idx][:, : ref.page_size_bytes]
                host = self._host[ref.tensor_idx][:, : ref.page_size_bytes]
                if store:
                    host[chunks] = device[blocks]
                else:
                    device[blocks] = host[chunks]
                num_bytes += size * ref.page_size_bytes
            first += size
        self._finished.append(TransferResult(job_id, True, num_bytes, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Every job was done when it was submitted."""

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()


class CpuTiering(TieringOffloadingSpec):
    """TieringOffloadingSpec with that worker, one block a chunk."""

    worker_type: ClassVar[type[CpuWorker]] = CpuWorker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return self.worker_type(kv_caches, region)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker


class GarbageWorker(CpuWorker):
    """Its loads write noise: what it loads must never be used."""

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        done = super().submit_load(job_id, src_spec, dst_spec)
        blocks = torch.from_numpy(dst_spec.block_ids).long()
        for refs in self._groups:
            for ref in refs:
                self._device[ref.tensor_idx][blocks, : ref.page_size_bytes] = 53
        return done


class GarbageTiering(CpuTiering):
    """CpuTiering with that worker."""

    worker_type = GarbageWorker


class FailingOffloadingConnector(OffloadingConnector):
    """Each of its loads fails, and says so as the interface has it."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = set(results.finished_recving)
        return results
