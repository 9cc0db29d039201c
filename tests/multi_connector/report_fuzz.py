# SPDX-License-Identifier: Apache-2.0
"""Random requests, aborts and children on vLLM's real scheduler: no block is freed too early, and none is left.

    python -m tests.multi_connector.report_fuzz [--seeds N] [--first N] [--mode MODE]

Prints what is wrong with a seed, and one JSON line a mode. Exit status 1 if anything was.
"""

import argparse
import json
import logging
import pickle
import random
import sys
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from devtools.scheduler_lab import LabSettings, make_request, make_scheduler, runner_output, sampled_tokens
from tests.multi_connector import tables
from tests.multi_connector.fakes import BLOCK, vllm_config
from tests.multi_connector.lockstep import Clock, Lockstep
from tests.multi_connector.random_child import RandomChild, World, random_child

NUM_STEPS = 160
"""With new requests; then the engine runs until nothing is left."""
MOST_STEPS_TO_END = 400
STEPS_AFTER_END = 5
STEP_S = 0.01


@dataclass(frozen=True, slots=True)
class Mode:
    is_asynchronous: bool = False
    ranks: int = 1
    raises: float = 0.0


MODES = {
    "plain": Mode(),
    "tp": Mode(ranks=2),
    "async": Mode(is_asynchronous=True),
    "async-tp": Mode(is_asynchronous=True, ranks=2),
    "raise": Mode(raises=0.01),
    "async-tp-raise": Mode(is_asynchronous=True, ranks=2, raises=0.01),
}


class ConnectedScheduler:
    """vLLM's scheduler with a MultiConnector, and that connector's workers: an engine without a model."""

    def __init__(
        self, *children: dict[str, Any], mode: Mode, num_blocks: int = 200, num_state_groups: int = 0, **settings: Any
    ) -> None:
        """``settings``: the MultiConnector's."""
        self.settings = LabSettings(
            block_size=BLOCK,
            budget=256,
            num_blocks=num_blocks,
            num_state_groups=num_state_groups,
            max_requests=8,
            max_context=2048,
            is_asynchronous=mode.is_asynchronous,
            kv_transfer_config=vllm_config(*children, **settings).kv_transfer_config,
        )
        self.scheduler: Any = make_scheduler(self.settings)
        self.lockstep = Lockstep(*children, ranks=mode.ranks, recurrent=num_state_groups > 0, **settings)
        self.lockstep.scheduler = self.scheduler.connector
        self._clock = Clock()
        self._half._clock = self._clock
        for worker in self.lockstep.workers:
            worker._worker._clock = self._clock
        self._planned: deque[tuple[SchedulerOutput, KVConnectorOutput, dict[str, list[int]]]] = deque()
        self._steps_ahead = int(mode.is_asynchronous)
        self._num_free = self._pool.get_num_free_blocks()

    @property
    def _half(self) -> Any:
        return self.scheduler.connector._scheduler

    @property
    def _pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, name: str, tokens: list[int], max_tokens: int) -> None:
        self.scheduler.add_request(make_request(name, tokens, max_tokens, self.settings))

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """An asynchronous scheduler learns of a step after it has planned the next one."""
        self._clock.now += STEP_S
        output = self.scheduler.schedule()
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        reports = self.lockstep.run(metadata, set(output.finished_req_ids))
        self._planned.append((output, reports, sampled_tokens(self.scheduler, output)))
        while len(self._planned) > self._steps_ahead:
            output, reports, sampled = self._planned.popleft()
            self.scheduler.update_from_output(output, runner_output(sampled, reports))

    @property
    def faults(self) -> dict[str, int]:
        """What vLLM's scheduler counted that a connector should not have done."""
        return dict(self.scheduler.kv_connector_faults)

    def left(self) -> dict[str, Any]:
        """What is not empty of the tables of all processes and of the block pool."""
        aggregator = self.lockstep.aggregator
        found = {
            "requests": sorted(self.scheduler.requests),
            "delayed": sorted(self.scheduler._delayed_frees),
            "blocks": self._num_free - self._pool.get_num_free_blocks(),
            "scheduler": tables.of_scheduler(self.scheduler.connector),
            "workers": sum(tables.of_worker(worker) + tables.living(worker) for worker in self.lockstep.workers),
            "aggregator": len(aggregator._send_remaining_count)
            + len(aggregator._recv_remaining_count)
            + len(aggregator._reported)
            + len(aggregator._failed_recving_pending),
        }
        return {what: number for what, number in found.items() if number}


class Run:
    """One seed."""

    def __init__(self, seed: int, mode: Mode) -> None:
        self.world = RandomChild.world = World(seed, mode.raises)
        self._random = random.Random(seed)
        self.engine = ConnectedScheduler(
            *map(random_child, "abc"),
            mode=mode,
            num_blocks=self._random.choice([40, 80, 200]),
            num_state_groups=self._random.choice([0, 1]),
            retry_first_s=0.01,
            retry_longest_s=0.05,
            isolate_after_s=0,
        )

    def wrong(self) -> str | None:
        """Plays it to its end; the first thing that is not as it should be."""
        for number in range(NUM_STEPS):
            if self._random.random() < 0.35:
                self._start(f"r{number}")
            if wrong := self._step():
                return wrong
        self.world.raises = 0.0
        return self._end()

    def _end(self) -> str | None:
        for _ in range(MOST_STEPS_TO_END):
            if not self.engine.left():
                break
            if wrong := self._step():
                return wrong
        for _ in range(STEPS_AFTER_END):
            if wrong := self._step():
                return wrong
        left = self.engine.left()
        return f"left: {left}" if left else None

    def _start(self, name: str) -> None:
        """Few tokens of few kinds, so that some requests begin alike."""
        self.world.seen["requests"] += 1
        tokens = [self._random.randrange(3) for _ in range(self._random.randint(5, 200))]
        self.engine.add(name, tokens, self._random.randint(1, 12))

    def _step(self) -> str | None:
        requests = self.engine.scheduler.requests
        if requests and self._random.random() < 0.12:
            name = self._random.choice(list(requests))
            if not requests[name].is_finished():
                self.world.seen["aborted"] += 1
                self.engine.abort(name)
        self.engine.step()
        for child, request_id in self.world.touched():
            if request_id not in requests:
                return f"blocks of {request_id} were freed while child {child} may touch them"
        return f"faults: {self.engine.faults}" if self.engine.faults else None


def wrong_seeds(mode: str, first: int, seeds: int) -> tuple[dict[int, str], Counter[str]]:
    """Seed -> what is wrong with it, and what happened in all of them."""
    wrong: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        run = Run(seed, MODES[mode])
        try:
            found = run.wrong()
        except Exception as error:
            found = repr(error)
        seen += run.world.seen
        if found is not None:
            wrong[seed] = found
    return wrong, seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--mode", choices=[*MODES, "all"], default="all")
    arguments = parser.parse_args()
    # A child that raises is logged each time.
    logging.disable(logging.CRITICAL)
    number = 0
    for mode in MODES if arguments.mode == "all" else [arguments.mode]:
        wrong, seen = wrong_seeds(mode, arguments.first, arguments.seeds)
        for seed, found in wrong.items():
            print(f"{mode} {seed}: {found}", flush=True)
        print("TOTAL " + json.dumps({"mode": mode, "seeds": arguments.seeds, "wrong": len(wrong), **seen}), flush=True)
        number += len(wrong)
    return 1 if number else 0


if __name__ == "__main__":
    sys.exit(main())
