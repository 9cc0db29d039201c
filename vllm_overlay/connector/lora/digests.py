# SPDX-License-Identifier: Apache-2.0
"""The LoRA adapters that a worker's process has loaded, by digests of their weights.

vLLM calls ``LoadedAdapters.heard`` with each adapter that it loads (patch 0016), before it computes with it. It loads
at start, by request, again after an eviction, and in place. What counts is what was loaded, not what lies on disk.
"""

import functools
import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from vllm_overlay.common.fence import SHUTDOWN
from vllm_overlay.connector.lora.metadata import AdapterWeights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)


class LoadedAdapters:
    """One entry for each adapter that was ever loaded. ``settings`` are vLLM's settings that change what it
    computes."""

    def __init__(self, settings: str = "") -> None:
        self._settings = settings
        self._digests: dict[int, bytes] = {}
        self._generations: Counter[int] = Counter()
        self._names: dict[int, tuple[str, str]] = {}
        self._seen: dict[tuple[str, str], set[bytes]] = {}
        self.version = 0
        """Changes with what ``weights`` returns."""

    def heard(self, request: "LoRARequest", model: "LoRAModel") -> None:
        """Called by vLLM when it has loaded ``model`` under ``request.lora_int_id``. Raises nothing: an adapter whose
        weights cannot be read is unknown."""
        try:
            digest = self._digest(model)
        except SHUTDOWN:
            raise
        except BaseException:
            logger.exception(
                "Requests of LoRA adapter %s are not offloaded: its weights cannot be read", request.lora_name
            )
            digest = b""
        name = (request.lora_name, request.lora_path)
        if (self._digests.get(request.lora_int_id), self._names.get(request.lora_int_id)) != (digest, name):
            self._digests[request.lora_int_id] = digest
            self._names[request.lora_int_id] = name
            self._generations[request.lora_int_id] += 1
            self._seen.setdefault(name, set()).add(digest)
            self.version += 1

    def weights(self) -> Iterator[AdapterWeights]:
        """What is loaded, or was until vLLM evicted it. An evicted adapter is loaded again, and heard of, before it
        computes."""
        return map(self._weights_of, self._digests)

    def computes_with(self, weights: AdapterWeights) -> bool:
        """Whether a pass computes with these very weights under their id."""
        return self._digests.get(weights.adapter_id) == weights.digest

    def have_still(self, weights: AdapterWeights) -> bool:
        """Whether ``computes_with`` holds, and has held in every pass since the weights were reported. As much must
        still be known of their name and path."""
        return self.computes_with(weights) and self._weights_of(weights.adapter_id) == weights

    def _weights_of(self, adapter_id: int) -> AdapterWeights:
        is_only = len(self._seen[self._names[adapter_id]]) == 1
        return AdapterWeights(adapter_id, self._digests[adapter_id], is_only, self._generations[adapter_id])

    def _digest(self, model: "LoRAModel") -> bytes:
        facts = {
            "settings": self._settings,
            "loras": {name: [layer.rank, layer.scaling] for name, layer in model.loras.items()},
            "is_3d": model.is_3d_lora_weight,
        }
        digest = blake3(json.dumps(facts, sort_keys=True).encode(), max_threads=blake3.AUTO)
        for name, tensor in sorted(_tensors(model), key=lambda item: item[0]):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
        return digest.digest()


class AdapterReports:
    """What one connector has told its scheduler about the process's adapters."""

    def __init__(self, adapters: LoadedAdapters) -> None:
        self._adapters = adapters
        self._sent: dict[int, AdapterWeights] = {}
        self._sent_version = 0

    @property
    def have_changed(self) -> bool:
        """Whether ``take_changes`` would say something."""
        return self._sent_version != self._adapters.version

    def take_changes(self) -> Counter[AdapterWeights]:
        """What has changed since the last call, each counted once for this rank."""
        if not self.have_changed:
            return Counter()
        loaded = {weights.adapter_id: weights for weights in self._adapters.weights()}
        changes = [weights for weights in loaded.values() if self._sent.get(weights.adapter_id) != weights]
        self._sent, self._sent_version = loaded, self._adapters.version
        return Counter(changes)


def _tensors(model: "LoRAModel") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of an adapter as it is read from its files, before vLLM packs it. Raises TypeError for others."""
    parts: dict[str, object] = {}
    for name, layer in model.loras.items():
        parts[f"{name} A"], parts[f"{name} B"] = layer.lora_a, layer.lora_b
    for name, module in model.modules_to_save.items():
        parts[f"{name} weight"], parts[f"{name} bias"] = module.weight, module.bias
    for name, tensor in parts.items():
        if isinstance(tensor, torch.Tensor):
            yield name, tensor
        elif tensor is not None:
            raise TypeError(f"{name} is a {type(tensor).__name__}")


@functools.cache
def _listening(settings: str) -> LoadedAdapters:
    from vllm.lora import worker_manager

    adapters = LoadedAdapters(settings)
    worker_manager.adapter_load_listeners.append(adapters.heard)
    return adapters


def loaded_adapters(vllm_config: "VllmConfig") -> LoadedAdapters:
    """The adapters of this process. Its connectors share them, and later instances too. Called at start."""
    if vllm_config.lora_config is None:
        return LoadedAdapters()
    return _listening(vllm_config.lora_config.compute_hash())
