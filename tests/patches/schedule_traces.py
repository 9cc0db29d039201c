# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler does and tells its connector, step by step, in random runs: a line of JSON each.

``python -m tests.patches.schedule_traces SEEDS``: the path of vLLM, then SEEDS runs with each of two match
units, with and without decode context parallelism. The connector has ``supports_divergent_local_hybrid_hits``, as
NIXL's have, and holds a random prefix of each prompt.
"""

import dataclasses
import itertools
import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.outputs import KVConnectorOutput

from devtools.scheduler_lab import LabSettings, fill, make_request, make_scheduler, runner_output

BLOCK, UNIT = 64, 16

CONFIG = {
    "kv_connector": "TracedConnector",
    "kv_connector_module_path": "tests.patches.schedule_traces",
    "kv_role": "kv_both",
}
ADDED = {"step"}  # the fields of SchedulerOutput that are the series' own
STATS = ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits")
trace: list[Any] = []


class TracedConnector(KVConnectorBase_V1, SupportsHMA):
    """Holds a prefix of each prompt, as ``source`` has it, and writes down what it is asked and told."""

    source = random.Random()

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.held: dict[str, tuple[int, bool]] = {}
        self.loading: set[str] = set()

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id not in self.held:
            reach = self.source.choice([0, request.num_tokens - 1, self.source.randrange(request.num_tokens)])
            self.held[request.request_id] = (reach, self.source.random() < 0.7)
        reach, asynchronous = self.held[request.request_id]
        offered = max(0, reach - num_computed_tokens)
        answer = (None, False) if self.source.random() < 0.1 else (offered, asynchronous and offered > 0)
        trace.append(["lookup", request.request_id, num_computed_tokens, request.shared_prefix_boundary, answer])
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        hashed = [[block.block_hash is not None for block in group] for group in blocks.blocks]
        trace.append(["allocated", request.request_id, blocks.get_block_ids(), hashed, num_external_tokens])
        if num_external_tokens and self.held[request.request_id][1]:
            self.loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        trace.append(["finished", request.request_id, block_ids])
        return False, None

    request_finished = request_finished_all_groups

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


def plain(value: Any) -> Any:
    """A value as JSON can have it, the same in every process."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return type(value).__name__


def run(unit: int, ranks: int, seed: int) -> None:
    """Six prompts with common prefixes, met in random order, while blocks are lost and loads take their time."""
    source = TracedConnector.source = random.Random(seed)
    block = BLOCK * ranks
    settings = LabSettings(
        block_size=block,
        match_unit=unit,
        num_blocks=400,
        max_requests=4,
        max_context=8192,
        num_context_ranks=ranks,
        kv_transfer_config=KVTransferConfig(**CONFIG),
    )
    scheduler = make_scheduler(settings)
    connector: Any = scheduler.connector
    shared = [source.randrange(256) for _ in range(4 * block)]
    prompts = [
        shared[: source.randrange(block, len(shared))] + [seed, n] * source.randrange(1, 2 * block) for n in range(3)
    ]
    prompts += [[*shared[: n * block], 0] for n in (1, 2, 4)]
    for n, tokens in enumerate(source.sample(prompts, 3)):
        fill(scheduler, f"fill-{n}", tokens, settings)
    waiting = [make_request(f"request-{n}", tokens, 4, settings) for n, tokens in enumerate(prompts)]
    for _ in range(60):
        pool = scheduler.kv_cache_manager.block_pool
        lost = source.choice([0, 0, 0.3])
        pool.evict_blocks({one.block_id for one in pool.blocks if one.block_hash and source.random() < lost})
        if waiting and source.random() < 0.5:
            scheduler.add_request(waiting.pop(source.randrange(len(waiting))))
        output = scheduler.schedule()
        trace.append(["step", {name: value for name, value in plain(output).items() if name not in ADDED}])
        names = list(output.num_scheduled_tokens)
        loaded = {name for name in sorted(connector.loading) if source.random() < 0.5}
        connector.loading -= loaded
        requests = {name: scheduler.requests[name] for name in names}
        sampled = {name: [7] * (one.num_computed_tokens >= one.num_tokens) for name, one in requests.items()}
        result = runner_output(sampled, KVConnectorOutput(finished_recving=loaded))
        for outputs in scheduler.update_from_output(output, result).values():
            if stats := outputs.scheduler_stats:
                for one in (stats.prefix_cache_stats, stats.connector_prefix_cache_stats):
                    trace.append(["stats", [getattr(one, name) for name in STATS]])
    scheduler.shutdown()


def main() -> None:
    (seeds,) = sys.argv[1:]
    for unit, ranks in itertools.product((BLOCK, UNIT), (1, 2)):
        for seed in range(int(seeds)):
            trace.append(["run", unit, ranks, seed])
            run(unit, ranks, seed)
    print(json.dumps({"vllm": vllm.__file__}))
    for line in trace:
        print(json.dumps(line))


if __name__ == "__main__":
    sys.modules["tests.patches.schedule_traces"] = sys.modules["__main__"]
    main()
