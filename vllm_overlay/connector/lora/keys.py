# SPDX-License-Identifier: Apache-2.0
"""The names that the weights of LoRA adapters give to objects, as the scheduler's half knows them.

vLLM's block hashes hold an adapter's name and path, which stay when its weights change.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, overload
from weakref import WeakValueDictionary

from blake3 import blake3
from vllm.v1.request import RequestStatus

from vllm_overlay.connector.lookahead import LookaheadKeys
from vllm_overlay.connector.lora.metadata import AdapterCheck, AdapterWeights

if TYPE_CHECKING:
    from vllm.v1.request import Request


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


class RequestNames:
    """The names of one request's objects, from a lookup to the request's end or its next lookup.

    ``keys`` is None while the request is passed by. Either nobody knows which weights compute it, or some of its blocks
    may be from before the last reset. ``should_ask_again`` says that the weights may be known after this step.
    """

    def __init__(self, request: "Request", num_found: int, lookahead_units: int = 0) -> None:
        hashes = request.block_hashes
        self.block_hashes = LookaheadKeys(hashes, lookahead_units) if lookahead_units else hashes
        self.keys: Sequence[bytes] | None = None
        self.weights: AdapterWeights | None = None
        self.should_ask_again = False
        self._request = request
        self._num_found = num_found
        self._is_restored = False
        self._first_step: int | None = None
        self._is_passed_by = False
        self._unchecked: frozenset[int] = frozenset()

    @property
    def adapter_id(self) -> int:
        """vLLM's id of the adapter that computes it."""
        return int(self._request.lora_request.lora_int_id)

    def pass_by(self) -> None:
        """Neither restore nor store this request until it is looked up again."""
        self.keys, self._is_passed_by = None, True

    def restored(self, block_ids: Iterable[int]) -> None:
        """A load was planned into these blocks."""
        self._is_restored = True
        if self.weights is not None:
            self._unchecked = frozenset(block_ids)

    def name(self, weights: AdapterWeights | None) -> None:
        """Name its objects by what is loaded of its adapter."""
        self.weights = weights
        if weights is not None and not self._is_passed_by:
            self.keys = AdapterKeys(self.block_hashes, weights.digest)
            self._doubt_what_was_found()

    @property
    def doubts_local_hits(self) -> bool:
        """Whether several weights had its adapter's name and path. Block hashes do not tell which of them have computed
        what the device cache holds."""
        return self.weights is not None and not self.weights.is_only

    def _doubt_what_was_found(self) -> None:
        """Pass the request by if other weights may have computed its local hit."""
        if self.doubts_local_hits and self._num_found:
            self.keys = None

    def begin(self, step: int, is_scheduled: bool) -> AdapterCheck | None:
        """A step begins. The first pass shows what vLLM found in its own cache, because lookups hear of whole blocks
        only. A MultiConnector shows no pass of a request that must not be stored: one that was restored waits until its
        first pass, and runs from then on."""
        if not is_scheduled and not (self._unchecked and self._request.status == RequestStatus.RUNNING):
            return None
        if self._first_step is None:
            self._first_step = step
            if not self._is_restored:
                self._num_found = self._request.num_computed_tokens
            self._doubt_what_was_found()
        blocks, self._unchecked = self._unchecked, frozenset()
        return AdapterCheck(self._request.request_id, self.weights, blocks) if blocks and self.weights else None

    def learn(self, loaded: AdapterWeights | None, step: int) -> None:
        """Take in what was ``loaded`` when ``step`` had been computed. Step 0 means that its number is not known.

        What other weights have begun is stored no more. A request may have begun when its weights were not known. It is
        stored from now on, if these weights are those of its first pass or of before. Workers refuse to store once they
        have changed.
        """
        if self.weights is not None and self.weights != loaded:
            self.keys = None
        if self.weights is None and self._first_step is not None and 0 < step <= self._first_step:
            self.name(loaded)


class LoraNames:
    """Names the objects of every request, by what the workers have loaded. Called by the scheduler's half.

    There are three calls: ``names`` at a lookup, ``begin_step``, and ``learn`` with each step's reports. A request is
    forgotten with the ``RequestNames`` that the caller holds.

    Reports may come when later steps have begun. At most ``num_concurrent_steps`` are under way: vLLM's
    ``max_concurrent_batches``, two with asynchronous scheduling.
    """

    def __init__(self, world_size: int, num_concurrent_steps: int = 1, lookahead_units: int = 0) -> None:
        """``lookahead_units``: see ``LookaheadKeys``."""
        self._world_size = world_size
        self._lookahead_units = lookahead_units
        self._num_concurrent_steps = num_concurrent_steps
        self._loaded: dict[int, AdapterWeights] = {}
        self._asked: dict[int, int] = {}
        self._requests: WeakValueDictionary[str, RequestNames] = WeakValueDictionary()
        self._step = 0

    def names(self, request: "Request", num_local: int) -> RequestNames:
        """The names of a request that is looked up, of which ``num_local`` tokens are in the KV cache."""
        names = RequestNames(request, num_local, self._lookahead_units)
        if request.lora_request is None:
            self._requests.pop(request.request_id, None)
            names.keys = names.block_hashes
            return names
        adapter_id = request.lora_request.lora_int_id
        self._requests[request.request_id] = names
        names.name(self._loaded.get(adapter_id))
        names.should_ask_again = names.keys is None and self._may_be_reported(adapter_id)
        return names

    def _may_be_reported(self, adapter_id: int) -> bool:
        """Whether a lookup should be repeated after this step.

        An adapter that was loaded ahead of its requests is reported with the first step after that. So an unknown
        adapter is waited for from its first lookup until the next step has been reported, and never again.
        """
        if adapter_id in self._loaded:
            return False
        return self._step < self._asked.setdefault(adapter_id, self._step) + self._num_concurrent_steps

    def begin_step(self, step: int, scheduled: Collection[str]) -> tuple[AdapterCheck, ...]:
        """A step's metadata goes to the workers. Returns what they have to check of restored requests that the step
        computes. Steps count up from 1."""
        self._step = step
        if not self._requests:
            return ()
        checks = [names.begin(step, request_id in scheduled) for request_id, names in self._requests.items()]
        return tuple(check for check in checks if check is not None)

    def learn(self, step: int, reports: Counter[AdapterWeights]) -> None:
        """Take in a step's reports. An adapter that the ranks have not all loaded alike is unknown."""
        for weights in reports:
            self._loaded.pop(weights.adapter_id, None)
        for weights, num_ranks in reports.items():
            if num_ranks == self._world_size and weights.digest:
                self._loaded[weights.adapter_id] = weights
        for names in self._requests.values():
            names.learn(self._loaded.get(names.adapter_id), step)
