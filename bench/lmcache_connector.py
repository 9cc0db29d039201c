# SPDX-License-Identifier: Apache-2.0
"""LMCache's connector for ``bench/serving.py``, with one repair: on a CPU it would restore zeros as states.

LMCache 0.5.6 moves the KV cache into shared memory, where its server reads and writes. Of a layer with states it moves
a view of its own (``lmcache/integration/vllm/kv_cache_group_edits.py``), so the model goes on using the old memory.
"""

import torch
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector  # type: ignore[import-not-found]
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig


class RepairedLMCacheConnector(LMCacheMPConnector):  # type: ignore[misc]
    """After LMCache has moved the KV cache, every layer uses what it was moved to."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._layers = vllm_config.compilation_config.static_forward_context

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """All tensors lie in one allocation, and LMCache moves at least one of them: that of attention."""
        old = next(iter(kv_caches.values())).untyped_storage().data_ptr()
        super().register_kv_caches(kv_caches)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kv_caches.values()}
        (moved,) = (storage for address, storage in storages.items() if address != old)
        for name, tensor in kv_caches.items():
            if tensor.untyped_storage().data_ptr() == old:
                tensor.set_(moved, tensor.storage_offset(), tensor.shape, tensor.stride())
                self._layers[name].bind_kv_cache(tensor)
