# SPDX-License-Identifier: Apache-2.0
"""A child that does at random what a connector may do, and knows which requests it may still touch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from tests.multi_connector.fakes import BLOCK, Boom, FakeChild, child

MOST_STEPS = 5
"""A load or a save takes 0 to that many steps on each rank."""

# How likely each is, each time that it could be.
ANSWERS_LATER = 0.1
HITS = 0.6
LOADS_SYNCHRONOUSLY = 0.3
LOAD_FAILS = 0.1
HOLDS = 0.5
MAY_REPORT_EARLY = 0.3
REPORTS_EARLY = 0.2
SHUTDOWN_RAISES = 0.3


class World:
    """What all children of one run share. A run is the same for the same seed."""

    def __init__(self, seed: int = 0, raises: float = 0.0) -> None:
        """``raises``: how likely each call of a hook raises."""
        self.random = Random(seed)
        self.raises = raises
        self.workers: list[RandomChild] = []
        """The worker-side instances that have not been shut down."""
        self.seen: Counter[str] = Counter()

    def happens(self, likelihood: float, what: str = "") -> bool:
        """Draws; counts it as ``what`` if it happens."""
        if self.random.random() >= likelihood:
            return False
        if what:
            self.seen[what] += 1
        return True

    def touched(self) -> Iterable[tuple[str, str]]:
        """(child, request) that some worker may still read or write."""
        for instance in self.workers:
            for request_id in (*instance.loads, *instance.saves):
                yield instance.name, request_id


@dataclass
class RandomMetadata(KVConnectorMetadata):
    loads: dict[str, bool] = field(default_factory=dict)
    """Request -> whether it is loaded asynchronously."""
    saves: list[str] = field(default_factory=list)
    """Finished requests whose blocks this child holds."""
    early: list[str] = field(default_factory=list)
    """Living requests whose blocks it will hold: the workers may report them at once."""


def random_child(name: str) -> dict[str, Any]:
    """One entry of ``connectors``."""
    return {**child(name, "RandomChild"), "kv_connector_module_path": __name__}


class RandomChild(FakeChild):
    """Uses all the freedom that the interface leaves, but that it changes no report of the scheduler's.

    It loads at once or over some steps, holds blocks of finished requests, reports before it is told to, fails and
    raises.
    """

    world: ClassVar[World] = World()
    """Set by the test before it builds any."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.name: str = vllm_config.kv_transfer_config.kv_connector_extra_config["name"]
        # The scheduler's half.
        self._offered: dict[str, bool] = {}
        self._new_loads: dict[str, bool] = {}
        self._early: set[str] = set()
        self._new_saves: set[str] = set()
        # The workers' half.
        self.loads: dict[str, int] = {}
        """Request -> steps until its load has ended."""
        self.saves: dict[str, int] = {}
        self._failed_synchronous: set[str] = set()
        self._told_early: set[str] = set()
        self._new_early: set[str] = set()
        if role is KVConnectorRole.WORKER:
            self.world.workers.append(self)

    def _may_raise(self, hook: str) -> None:
        if self.world.happens(self.world.raises, "raised"):
            raise Boom(hook)

    # ---- The scheduler's half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._may_raise("get_num_new_matched_tokens")
        if self.world.happens(ANSWERS_LATER):
            return None, False
        blocks = (request.num_tokens - 1 - num_computed_tokens) // BLOCK
        tokens = self.world.random.randint(0, blocks) * BLOCK if blocks > 0 and self.world.happens(HITS) else 0
        is_asynchronous = tokens > 0 and not self.world.happens(LOADS_SYNCHRONOUSLY)
        self._offered[request.request_id] = is_asynchronous
        return tokens, is_asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._may_raise("update_state_after_alloc")
        request_id = request.request_id
        if num_external_tokens:
            self._new_loads[request_id] = self._offered[request_id]
        if self.world.happens(MAY_REPORT_EARLY):
            self._early.add(request_id)

    def build_connector_meta(self, scheduler_output: Any) -> RandomMetadata:
        self._may_raise("build_connector_meta")
        early = sorted(self._early & scheduler_output.num_scheduled_tokens.keys())
        metadata = RandomMetadata(self._new_loads, sorted(self._new_saves), early)
        self._new_loads, self._new_saves = {}, set()
        return metadata

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        self._may_raise("request_finished_all_groups")
        request_id = request.request_id
        self._offered.pop(request_id, None)
        holds = request_id in self._early or self.world.happens(HOLDS)
        self._early.discard(request_id)
        if holds:
            self.world.seen["held" if any(block_ids) else "held without blocks"] += 1
            self._new_saves.add(request_id)
        return holds, None

    def update_connector_output(self, connector_output: Any) -> None:
        self._may_raise("update_connector_output")

    # ---- The workers' half.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RandomMetadata)
        self._may_raise("start_load_kv")
        for request_id, is_asynchronous in metadata.loads.items():
            if is_asynchronous:
                self.loads[request_id] = self.world.random.randint(0, MOST_STEPS)
            elif self.world.happens(LOAD_FAILS, "failed a synchronous load"):
                self._failed_synchronous.add(request_id)
        for request_id in metadata.saves:
            if request_id in self._told_early:
                self._told_early.discard(request_id)
            else:
                self.saves[request_id] = self.world.random.randint(0, MOST_STEPS)
        for request_id in metadata.early:
            if request_id not in self._told_early and self.world.happens(REPORTS_EARLY, "reported early"):
                self._told_early.add(request_id)
                self._new_early.add(request_id)

    def wait_for_save(self) -> None:
        self._may_raise("wait_for_save")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._may_raise("get_transfer_results")
        received = _ended(self.loads)
        failed = {request_id for request_id in received if self.world.happens(LOAD_FAILS, "failed a load")}
        results = KVConnectorTransferResults(
            finished_sending=self._new_early.union(_ended(self.saves)),
            finished_recving=set(received),
            failed_recving=failed | self._failed_synchronous,
        )
        self._new_early, self._failed_synchronous = set(), set()
        return results

    def shutdown(self) -> None:
        if self.world.raises and self.world.happens(SHUTDOWN_RAISES, "raised in shutdown"):
            raise Boom("shutdown")
        if self in self.world.workers:
            self.world.workers.remove(self)


def _ended(transfers: dict[str, int]) -> list[str]:
    """Takes out the transfers that have no step left, and a step off the others."""
    ended = [request_id for request_id, steps in transfers.items() if steps == 0]
    for request_id in ended:
        del transfers[request_id]
    for request_id in transfers:
        transfers[request_id] -= 1
    return ended
