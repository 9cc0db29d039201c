# SPDX-License-Identifier: Apache-2.0
"""A KV connector that has everything, offers hits of random lengths, and whose loads fail at random."""

import random
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request

PATH = "devtools.poison.connector"


@dataclass(slots=True)
class Habits:
    """Of one seed. The scheduler builds the connector: it takes these from ``PoisonConnector.habits``."""

    dice: random.Random
    unit: int
    share_of_hits: float = 0.7
    share_of_failures: float = 0.0
    share_of_async: float = 0.0
    share_of_aligned: float = 0.5
    """Hits that end on a unit."""
    share_of_undecided: float = 0.0
    """Lookups that are answered with None."""
    reports_blocks: bool = False
    keeps_delivery: bool = False
    completes_attention: bool = False
    """Asynchronous loads leave out attention that is cached locally (patch 0012)."""


@dataclass(slots=True)
class Load:
    """One load that the worker is to do: tokens ``start`` to ``end`` of ``tokens`` into blocks, by group."""

    request_id: str
    tokens: list[int]
    start: int
    end: int
    blocks: tuple[list[int], ...]
    is_async: bool
    fails: bool
    dice: int
    """Seeds what the worker draws for this load, so that schedules with and without it can be compared."""


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):
    """What the worker is to load, and which blocks have a state to store after the step: of which tokens."""

    loads: list[Load]
    offers: list[tuple[int, list[int]]]


class PoisonConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side; the worker's is ``devtools.poison.worker``."""

    habits: Habits

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._asked: dict[str, tuple[int, bool]] = {}
        self._requests: dict[str, Request] = {}
        self._loads: list[Load] = []

    def on_new_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    @property
    def requires_kv_delivery(self) -> bool:
        return self.habits.keeps_delivery

    def completes_local_attention(self, request: Request) -> bool:
        return self.habits.completes_attention

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        habits, dice = self.habits, self.habits.dice
        if dice.random() < habits.share_of_undecided:
            return None, False
        is_async = dice.random() < habits.share_of_async
        self._asked[request.request_id] = (num_computed_tokens, is_async)
        most = request.num_tokens - 1
        if most <= num_computed_tokens or dice.random() >= habits.share_of_hits:
            return 0, False
        end = dice.randint(num_computed_tokens + 1, most)
        if dice.random() < habits.share_of_aligned:
            end = max(end // habits.unit * habits.unit, num_computed_tokens)
        return end - num_computed_tokens, is_async and end > num_computed_tokens

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        start, is_async = self._asked[request.request_id]
        block_ids = tuple(list(ids) for ids in blocks.get_block_ids())
        if is_async and self.habits.completes_attention:
            # Blocks with a hash are cached: others may read them.
            block_ids[0][:] = [0 if block.block_hash else block.block_id for block in blocks.blocks[0]]
        self._loads.append(
            Load(
                request_id=request.request_id,
                tokens=list(request.all_token_ids[: start + num_external_tokens]),
                start=start,
                end=start + num_external_tokens,
                blocks=block_ids,
                is_async=is_async,
                fails=self.habits.dice.random() < self.habits.share_of_failures,
                dice=self.habits.dice.getrandbits(32),
            )
        )

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        loads, self._loads = self._loads, []
        offered = scheduler_output.kv_connector_block_state.boundary_state_offloads
        offers = [
            (block, list(self._requests[name].all_token_ids[:boundary]))
            for name, of_request in offered.items()
            for _, block, boundary in of_request
        ]
        return StepOrders(loads, offers)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def _is_the_workers(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _is_the_workers
