# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as the scheduler's half knows them, and the names that their weights give to objects.

vLLM's block hashes hold an adapter's name and path, which stay when its weights change.
"""

from collections import Counter
from collections.abc import Sequence
from typing import overload

from blake3 import blake3

from vllm_overlay.connector.metadata import AdapterWeights


class AdapterKeys(Sequence[bytes]):
    """A request's block hashes, each hashed with the digest of the weights that compute it. Derived when asked for."""

    def __init__(self, block_hashes: Sequence[bytes], digest: bytes) -> None:
        self._block_hashes = block_hashes
        self._digest = digest
        self._derived: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self._key(block_hash) for block_hash in self._block_hashes[index]]
        return self._key(self._block_hashes[index])

    def _key(self, block_hash: bytes) -> bytes:
        key = self._derived.get(block_hash)
        if key is None:
            key = self._derived[block_hash] = blake3(block_hash, key=self._digest).digest()
        return key


class Adapters:
    """What the workers have loaded, by vLLM's id of an adapter. One entry for each that they ever reported."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._loaded: dict[int, AdapterWeights] = {}
        self._asked: dict[int, int] = {}
        self._step = 0

    def next_step(self) -> None:
        """A step's metadata goes to the workers: whatever they report comes back before the next step's lookups."""
        self._step += 1

    def may_be_reported(self, adapter_id: int) -> bool:
        """Whether a lookup should be repeated after this step.

        An adapter that was loaded ahead of its requests is reported with the first step after that, so an unknown
        one is waited for in the step of its first lookup, and never again.
        """
        return adapter_id not in self._loaded and self._asked.setdefault(adapter_id, self._step) == self._step

    def learn(self, reports: Counter[AdapterWeights]) -> None:
        """Take in a step's reports: what not every rank has loaded alike is unknown."""
        for weights in reports:
            self._loaded.pop(weights.adapter_id, None)
        for weights, num_ranks in reports.items():
            if num_ranks == self._world_size and weights.digest:
                self._loaded[weights.adapter_id] = weights

    def loaded(self, adapter_id: int) -> AdapterWeights | None:
        """The weights that the workers last reported; they may have changed since, which workers check in each pass."""
        return self._loaded.get(adapter_id)
