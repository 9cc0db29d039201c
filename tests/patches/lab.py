# SPDX-License-Identifier: Apache-2.0
"""For the reproductions: a real engine on the tiny model, and a connector that keeps pages and can be told to lie.

Everything runs in one process, so a reproduction changes the connector by setting attributes of ``LabConnector``.
"""

import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.kv_cache_utils import get_group_id

from devtools.poison.seed import Column, run_seed
from tests.engine.states import FLOAT32

N = FLOAT32.block_size
"""Every reproduction's, on every processor."""

Pages = dict[tuple[int, int], dict[str, torch.Tensor]]


@dataclass
class Snapshot:
    """Copies of the pages that hold one prefix: ``(group, index of the block)`` -> layer -> page."""

    pages: Pages = field(default_factory=dict)


@dataclass
class LabMetadata(KVConnectorMetadata):
    """(key, group, index, block) of what to copy after this step; (request, key, first block, block ids) to load."""

    stores: list[tuple[tuple[int, ...], int, int, int]] = field(default_factory=list)
    loads: list[tuple[str, tuple[int, ...], int, tuple[list[int], ...]]] = field(default_factory=list)


class LabConnector(KVConnectorBase_V1, SupportsHMA):
    """A correct external cache, until a reproduction replaces one of the attributes below."""

    asynchronous: ClassVar[bool] = True
    answer: ClassVar[Callable[[Any, int], tuple[int | None, bool]] | None] = None
    report: ClassVar[Callable[[set[str]], KVConnectorTransferResults] | None] = None
    bad_blocks: ClassVar[Callable[[list[tuple[list[int], ...]]], set[int]] | None] = None
    load: ClassVar[Callable[[str], str]] = lambda request_id: "right"
    """"right", "nothing" (blocks stay as they are) or "noise" for each load."""
    delay_free: ClassVar[bool] = False
    completes: ClassVar[bool] = False
    """Whether it completes a local attention hit with a state; only asynchronously."""
    stores: ClassVar[bool] = True
    snapshots: ClassVar[dict[tuple[int, ...], Snapshot]] = {}
    answers: ClassVar[list[tuple[str, int]]] = []
    attempts: ClassVar[list[tuple[str, int]]] = []
    """(request, tokens) of every load that the scheduler asked for."""
    loaded_pages: ClassVar[list[tuple[int, int]]] = []
    """(group, index of the block) of every page that was loaded."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._groups = kv_cache_config.kv_cache_groups
        self._recurrent = [i for i, group in enumerate(self._groups) if "Mamba" in type(group.kv_cache_spec).__name__]
        self._requests: dict[str, Any] = {}
        self._num_local: dict[str, int] = {}
        self._pending: list[tuple[str, tuple[int, ...], int, tuple[list[int], ...]]] = []
        self._caches: dict[str, torch.Tensor] = {}
        self._loaded: list[tuple[str, tuple[list[int], ...]]] = []

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._requests[request.request_id] = request
        self._num_local[request.request_id] = num_computed_tokens
        answer = LabConnector.answer
        if answer is not None:
            found = answer(request, num_computed_tokens)
        else:
            tokens = tuple(request.all_token_ids)
            best = max(
                (len(key) for key in self.snapshots if len(key) < len(tokens) and tokens[: len(key)] == key), default=0
            )
            matched = max(0, best - num_computed_tokens)
            found = matched, matched > 0 and self.asynchronous
        self.answers.append((request.request_id, num_computed_tokens))
        return found

    def completes_local_attention(self, request: Any) -> bool:
        return self.completes

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self.attempts.append((request.request_id, num_external_tokens))
            num_local = self._num_local[request.request_id]
            key = tuple(request.all_token_ids)[: num_local + num_external_tokens]
            block_ids = blocks.get_block_ids()
            if self.completes and self.asynchronous:  # what the device cache has is not loaded
                block_ids = tuple(
                    [0 if block.block_hash else block.block_id for block in group] for group in blocks.blocks
                )
            self._pending.append((request.request_id, key, num_local // N, block_ids))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata = LabMetadata(loads=self._pending)
        self._pending = []
        state = scheduler_output.kv_connector_block_state
        for request_id, offers in (state.boundary_state_offloads if state is not None else {}).items():
            tokens, block_ids = tuple(self._requests[request_id].all_token_ids), state.get_block_ids(request_id)
            for group, block, boundary in offers:
                key = tokens[:boundary]
                metadata.stores.append((key, group, (boundary - 1) // N, block))
                for other, ids in enumerate(block_ids):
                    if other not in self._recurrent:
                        metadata.stores += [(key, other, i, ids[i]) for i in range(-(-boundary // N))]
        return metadata

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.delay_free, None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.delay_free, None

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, key, first, block_ids in self._get_connector_metadata().loads:
            how = LabConnector.load(request_id)
            snapshot = self.snapshots.get(key)
            for group, ids in enumerate(block_ids):
                last = (len(key) - 1) // N
                for index in [last] if group in self._recurrent else range(first, last + 1):
                    if ids[index] == 0:  # vLLM's null block: nothing is to be loaded there
                        continue
                    self.loaded_pages.append((group, index))
                    for layer in self._groups[group].layer_names:
                        page = self._caches[layer][ids[index]]
                        if how == "right" and snapshot is not None:
                            page.copy_(snapshot.pages[group, index][layer])
                        elif how == "noise":
                            page.view(torch.int8).fill_(53)
            self._loaded.append((request_id, block_ids))

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        if not self.stores:
            return
        for key, group, index, block in self._get_connector_metadata().stores:
            pages = self.snapshots.setdefault(key, Snapshot()).pages
            pages[group, index] = {name: self._caches[name][block].clone() for name in self._groups[group].layer_names}

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loaded = {request_id for request_id, _ in self._loaded}
        if LabConnector.report is not None:
            return LabConnector.report(loaded)
        return KVConnectorTransferResults(finished_recving=loaded if self.asynchronous else set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks = [block_ids for _, block_ids in self._loaded]
        self._loaded = []
        return LabConnector.bad_blocks(blocks) if LabConnector.bad_blocks is not None else set()


class LabStats(KVConnectorStats):
    """How many loads there were."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data["loads"] += other.data["loads"]
        return self

    def reduce(self) -> dict[str, Any]:
        return self.data

    def is_empty(self) -> bool:
        return not self.data


class StatsConnector(LabConnector):
    """A LabConnector that has stats, and no metrics."""

    def get_kv_connector_stats(self) -> KVConnectorStats:
        return LabStats(data={"loads": len(self.attempts)})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return LabStats(data=data or {})


def config(policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """The ``kv_transfer_config`` of a LabConnector."""
    return {
        "kv_connector": "LabConnector",
        "kv_connector_module_path": "tests.patches.lab",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Random tokens."""
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(num_tokens)]


class Lab:
    """One engine in this process; ``arguments`` are those of ``vllm.LLM``."""

    def __init__(self, kv_transfer_config: dict[str, Any] | None = None, **arguments: Any) -> None:
        settings = {
            **FLOAT32.arguments,
            "max_model_len": 8192,
            "max_num_batched_tokens": 2 * N,
            "prefix_match_unit": 64,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "disable_log_stats": False,
            "kv_transfer_config": kv_transfer_config or config(),
            **arguments,
        }
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self.llm = LLM(model=os.environ["TINY_MODEL"], **settings)
        self._names = 0

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def start(self, tokens: list[int], max_tokens: int = 6, priority: int = 0) -> str:
        """Hands in one request; returns its name."""
        self._names += 1
        name = f"request-{self._names}"
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2, ignore_eos=True)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, parameters, priority=priority)
        return name

    def run(self, *prompts: list[int], max_tokens: int = 6, max_steps: int = 400) -> list[dict[str, Any]]:
        """Steps until these requests, handed in together, are done. ``{}`` for one that is still there after that."""
        names = [self.start(tokens, max_tokens) for tokens in prompts]
        done: dict[str, dict[str, Any]] = {}
        for _ in range(max_steps):
            if len(done) == len(names):
                break
            for output in self.engine.step():
                if output.finished:
                    done[output.request_id] = _answer(output)
        for name in names:
            if name not in done:
                self.engine.abort_request([name])
        return [done.get(name, {}) for name in names]

    def forget(self, kind: str, first: int = 0) -> None:
        """Takes blocks of the groups of one kind ("Mamba", "FullAttention") out of the device prefix cache.

        Of each prompt those from the ``first`` on."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        group_ids = {i for i, group in enumerate(groups) if kind in type(group.kv_cache_spec).__name__}
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks(
            {
                block.block_id
                for block in pool.blocks
                if block.block_hash is not None
                and get_group_id(block.block_hash) in group_ids
                and block.block_hash_num_tokens > first * N
            }
        )

    def reset(self) -> None:
        """Empties the device prefix cache; the connector keeps what it has."""
        assert self.llm.reset_prefix_cache()

    def reset_all(self) -> None:
        """Empties the connector too; a LabConnector keeps what it has."""
        assert self.engine.reset_prefix_cache(reset_connector=True)


def _answer(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    chosen = zip(completion.token_ids, completion.logprobs, strict=True)
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [candidates[token].logprob for token, candidates in chosen],
        "best": [{token: it.logprob for token, it in candidates.items()} for candidates in completion.logprobs],
        "cached": output.num_cached_tokens,
        "reason": completion.finish_reason,
    }


def same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.02) -> bool:
    """Equal tokens, and logprobs within ``tolerance`` (NaN is never equal)."""
    if not one or not other or one["tokens"] != other["tokens"]:
        return False
    pairs = zip(one["logprobs"], other["logprobs"], strict=True)
    return all(abs(mine - theirs) <= tolerance for mine, theirs in pairs)


def near(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.05) -> bool:
    """For requests of unlike batches: kernels round by the batch, and may decide a near-tie otherwise.

    As far as the tokens are equal, their logprobs are within ``tolerance``. Where they first differ, that holds for
    both tokens, the best two of both runs. Nothing can be compared after that.
    """
    if not one or not other:
        return False
    for mine, theirs, *tokens in zip(one["best"], other["best"], one["tokens"], other["tokens"], strict=True):
        if not all(abs(mine.get(token, math.inf) - theirs.get(token, -math.inf)) <= tolerance for token in tokens):
            return False
        if tokens[0] != tokens[1]:
            return all(abs(best[tokens[0]] - best[tokens[1]]) <= tolerance for best in (mine, theirs))
    return True


def error_of(action: Callable[[], Any]) -> str:
    """The last line of what ``action`` raises, or "" when it raises nothing."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip()
    return ""


def conclude_of_seeds(column: Column) -> None:
    """Ends a reproduction that is random schedules, with an oracle for a worker: 100 seeds of the poison fuzz, of which
    some offer the connector a state that is another's."""
    problems = {seed: problem for seed in range(100) if (problem := run_seed(seed, column).problem)}
    conclude(any("offered" in problem for problem in problems.values()), not problems, problems=problems)


def conclude(symptom: bool, healthy: bool, **seen: Any) -> None:
    """Ends a reproduction: what the necessity test reads."""
    print(json.dumps({"vllm": vllm.__file__, "symptom": symptom, "healthy": healthy, **seen}, default=str))
