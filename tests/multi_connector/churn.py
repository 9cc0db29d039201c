# SPDX-License-Identifier: Apache-2.0
"""Random requests with aborts, preemptions and faults in one real engine; at the end nothing may be left anywhere.

    python -m tests.multi_connector.churn MODEL [--requests N] [--seed S]

Prints one JSON line: what happened, and what was left. Exit status 1 if anything was.
"""

import argparse
import json
import os
import random
import sys
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.engine.client import cpu_child, multi, prompt
from tests.engine.driver import Driver
from tests.engine.states import FLOAT32
from tests.multi_connector import tables
from tests.multi_connector.faulty import KINDS, Fault, Faults, hooks
from tests.multi_connector.matrix import CHILDREN
from tests.waiting import until

N = FLOAT32.block_size
MAX_RUNNING = 6


class Churn:
    """One engine with so few blocks that requests are preempted."""

    def __init__(self, model: str, seed: int) -> None:
        children = CHILDREN["ours"], cpu_child(name="steady", capacity_bytes="64 MiB")
        self.driver = Driver(
            {
                "model": model,
                **FLOAT32.arguments,
                "max_model_len": 2 * N,
                "max_num_batched_tokens": 2 * N,
                "max_num_seqs": MAX_RUNNING,
                "num_gpu_blocks_override": 14,
                "prefix_match_unit": 64,
                "enable_prefix_caching": True,
                "enforce_eager": True,
                "disable_log_stats": False,
                "kv_transfer_config": multi(*children, retry_first_s=0.02, retry_longest_s=0.5, isolate_after_s=3.0),
            }
        )
        self.engine = self.driver.llm.llm_engine
        self._random = random.Random(seed)
        self._prefixes = [prompt(N, number) for number in range(6)]
        self.seen = dict.fromkeys(("started", "finished", "aborted", "preempted", "faults", "resets", "steps"), 0)
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        scheduler = self.driver.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.seen["preempted"] += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted

    def _start(self, name: str) -> None:
        """Shared prefixes of any length, often so long that decoding needs another block."""
        length = self._random.choice([N - 3, N - 2, self._random.randint(10, N + 200)])
        tokens = (self._random.choice(self._prefixes) + prompt(400, self._random.randrange(4)))[:length]
        parameters = SamplingParams(temperature=0, max_tokens=self._random.randint(1, 8), ignore_eos=True)
        self.engine.add_request(name, {"prompt_token_ids": tokens}, parameters)

    def _maybe_fault(self) -> None:
        if self._random.random() < 0.1:
            kind = self._random.choice([kind for kind in KINDS if kind != "hangs"])
            role = self._random.choice(["scheduler", "worker"])
            Faults.fault = Fault(self._random.choice(hooks()), kind, role, self._random.random())
        elif self._random.random() < 0.3:
            self.seen["faults"] += Faults.fault is not None and Faults.fault.fired > 0
            Faults.fault = None

    def run(self, requests: int) -> None:
        """Until that many are finished or aborted, and more of them until there was an abort, a fault, an isolation.

        What a step draws rests on the seed; how many steps there are, on how long loads take.
        """
        living: list[str] = []

        def wants_more() -> bool:
            started = self.seen["started"]
            return started < requests or (started < 20 * requests and not self._has_seen_everything())

        while living or wants_more():
            while len(living) < MAX_RUNNING + 2 and wants_more():
                living.append(f"request-{self.seen['started']}")
                self._start(living[-1])
                self.seen["started"] += 1
            self._maybe_fault()
            for output in self.engine.step():
                if output.finished and output.request_id in living:
                    living.remove(output.request_id)
                    self.seen["finished"] += 1
            if living and self._random.random() < 0.04:
                name = living.pop(self._random.randrange(len(living)))
                self.engine.abort_request([name])
                self.seen["aborted"] += 1
            if self._random.random() < 0.01:
                self.seen["resets"] += bool(self.driver.llm.reset_prefix_cache())
            self.seen["steps"] += 1

    def _has_seen_everything(self) -> bool:
        isolations = self.driver.metric("vllm:kv_connector_isolations", {})
        return bool(self.seen["aborted"] and self.seen["faults"] and isolations)

    def left(self) -> dict[str, int]:
        """Entries in every table of requests, and device blocks that are not free."""
        Faults.fault = None
        scheduler = self.driver.engine_core.scheduler
        connector, worker = scheduler.connector, get_kv_transfer_group()

        def serves_and_rests() -> bool:
            self.driver._step()
            phases = {lifecycle.phase.name for lifecycle in connector._scheduler.supervisor.lifecycles}
            if "OPEN" in phases and not scheduler.has_requests():
                self._start("wakes")  # an idle engine makes no steps, in which a child would be tried again
            return phases == {"SERVING"} and not scheduler.has_requests()

        until(serves_and_rests, "the return of all children, and the end of all stores", longest_pause_s=0.0)
        self.driver.reset()
        self.driver._step()
        return {
            "blocks": tables.blocks_in_use(scheduler),
            "requests": len(scheduler.requests),
            "scheduler": tables.of_scheduler(connector),
            "worker": tables.of_worker(worker),
            "children": sum(len(child._scheduler._tracked) for child in connector.sub_connectors),
        }


def main() -> int:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    churn = Churn(arguments.model, arguments.seed)
    churn.run(arguments.requests)
    left = churn.left()
    counted = {
        what: churn.driver.metric(f"vllm:kv_connector_{what}", {}) for what in ("isolations", "returns", "failed_loads")
    }
    hits = churn.driver.metric("vllm:kv_connector_loaded_tokens", {"connector": "steady"})
    print("TOTAL " + json.dumps({**churn.seen, **counted, "steady_tokens": hits, "left": left}), flush=True)
    return 1 if any(left.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
