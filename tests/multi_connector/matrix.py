# SPDX-License-Identifier: Apache-2.0
"""The fault matrix: every hook x kind of fault x side, one after the other in one real engine with two children.

    python -m tests.multi_connector.matrix MODEL [--cells N] [--seed S] [--child ours|offloading]

For each cell, with the fault on, first while the faulty child loads a request: requests finish and equal the cold run
exactly, and the steady child hits. With the fault off: the faulty child returns to service, and loads again. One JSON
line a cell, then one with the totals.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.engine.client import cpu_child, multi, prompt
from tests.engine.driver import Driver
from tests.multi_connector import tables
from tests.multi_connector.faulty import AT_RETURN, HANG_AFTER_S, KINDS, Fault, Faults, HookClock, hooks
from tests.waiting import until

LENGTH = 200
RESTORABLE = 192
REPORT_TIMEOUT_S = 10.0
NOT_CALLED = {
    "get_finished": "the MultiConnector asks get_transfer_results",
    "request_finished": "the child supports several groups",
    "has_connector_metadata": "vLLM asks the MultiConnector, which answers itself",
    "role": "vLLM asks the MultiConnector, which answers itself",
    "get_finished_count": "asked once, at start",
    "get_mem_pool_context": "asked once, at start",
    "requires_kv_delivery": "asked once, at start",
    "reset_capture_state": "called while CUDA graphs are captured",
    "finish_forward": "called by the V2 model runner",
    "has_pending_block_frees": "asked when a request would be preempted: churn.py does that",
    "has_pending_push_work": "asked by the loop of an engine in a process of its own; here the driver steps",
}
"""Hooks that do not reach a child in a running CPU engine, and why; a fault in them cannot fire."""


def cells() -> list[tuple[str, str, str]]:
    """All of them."""
    return [(hook, kind, role) for hook in hooks() for kind in KINDS for role in ("scheduler", "worker")]


CHILDREN = {
    "ours": {
        # What the fault hides is never reported.
        **cpu_child(name="faulty", load_weight=2.0, capacity_bytes="64 MiB", report_timeout_s=REPORT_TIMEOUT_S),
        "kv_connector": "FaultyHybridOffloadConnector",
        "kv_connector_module_path": "tests.multi_connector.faulty",
    },
    "offloading": {
        "kv_connector": "FaultyOffloadingConnector",
        "kv_connector_module_path": "tests.multi_connector.faulty",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "name": "faulty",
            "load_weight": 2.0,
            "spec_name": "CpuTiering",
            "spec_module_path": "tests.multi_connector.third_party",
            "cpu_bytes_to_use": 64 << 20,
        },
    },
}
"""Which connector is faulty: a CPU tier of ours, or vLLM's own in its tiering form."""


STEADY = 1
"""Its place among the children; the faulty one is the first."""


def act_until(act: Callable[[], object], is_done: Callable[[], object], what: str) -> None:
    """Acts as long as that is not so."""

    def look() -> bool:
        if is_done():
            return True
        act()
        return False

    until(look, what, longest_pause_s=0.0)


class Matrix:
    """One engine, a reference output, and the cells."""

    def __init__(self, model: str, seed: int, child: str) -> None:
        children = CHILDREN[child], cpu_child(name="steady", capacity_bytes="128 MiB")
        pauses = {"retry_first_s": 0.02, "retry_longest_s": 0.1}
        self.driver = Driver(
            {
                "model": model,
                "max_model_len": 2304,
                "max_num_batched_tokens": 2304,
                "prefix_match_unit": 64,
                "enable_prefix_caching": True,
                "enforce_eager": True,
                "disable_log_stats": False,
                "kv_transfer_config": multi(*children, **pauses, hang_after_s=HANG_AFTER_S, isolate_after_s=8.0),
            }
        )
        HookClock.measure(self.driver.engine_core.scheduler.connector, get_kv_transfer_group())
        self._seed = seed
        self._names = 0
        self._tokens = prompt(LENGTH, seed)
        self._stored = "reference"
        """The salt of a request that the faulty child holds, and will be chosen for."""
        self._cold = self._run(self._stored)
        self._settle()

    @property
    def _scheduler(self) -> Any:
        return self.driver.engine_core.scheduler.connector._scheduler

    def _run(self, salt: str) -> dict[str, Any]:
        return self.driver.generate([self._tokens], max_tokens=3, salts=[salt])[0]

    def _equal(self, output: dict[str, Any]) -> bool:
        return all(output[key] == self._cold[key] for key in ("token_ids", "logprobs"))

    def _new_salt(self) -> str:
        self._names += 1
        return f"salt-{self._names}"

    def _abort_one(self) -> None:
        """A request that is gone before it is finished: that is when some hooks are called."""
        engine, name = self.driver.llm.llm_engine, self._new_salt()
        parameters = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": self._tokens, "cache_salt": name}, parameters)
        engine.step()
        engine.abort_request([name])
        engine.step()

    def _settle(self) -> None:
        """Steps until no child has stores under way; a fault may make its child say for ever that it has some."""
        connector = self.driver.engine_core.scheduler.connector
        whose = connector if Faults.fault is None else connector.sub_connectors[STEADY]
        act_until(self.driver._step, lambda: not whose.has_pending_push_work(), "the end of all stores")

    def _reset_device(self) -> None:
        act_until(self.driver._step, self.driver.llm.reset_prefix_cache, "a device cache that nobody holds")

    def run(self, hook: str, kind: str, role: str) -> dict[str, Any]:
        """One cell; what of it did not hold is under "wrong"."""
        started, wrong = time.monotonic(), []
        returns_before = self._counted("returns")
        self._reset_device()
        fault = Faults.fault = Fault(hook, kind, role, self._seed)
        if hook in AT_RETURN:
            Faults.also = Fault("wait_for_save", "raises once", "worker")
        if not self._equal(self._run(self._stored)):
            wrong.append("a request that the faulty child was loading differs")
        if hook == "reset_cache":
            self.driver.llm.reset_prefix_cache(reset_connector=True)
        salt = self._new_salt()
        if not self._equal(self._run(salt)):
            wrong.append("a cold request under the fault differs")
        self._settle()
        if hook in AT_RETURN:
            # Or until that serves, because the hook is not called on this side.
            self._run_until(lambda: fault.fired or self._is_serving, "the fault in a new instance")
        for _ in range(2):
            self._reset_device()
            output = self._run(salt)
            if not self._equal(output):
                wrong.append("a request served under the fault differs")
            if output["num_cached_tokens"] < RESTORABLE:
                wrong.append(f"only {output['num_cached_tokens']} tokens hit under the fault")
        self._abort_one()
        Faults.fault = Faults.also = None
        if fault.fired or hook in (*AT_RETURN, "reset_cache"):
            wrong += self._heal()
        return {
            "cell": [hook, kind, role],
            "fired": fault.fired,
            "isolated": self._counted("returns") > returns_before,
            "wrong": wrong,
            "seconds": round(time.monotonic() - started, 2),
        }

    def _run_until(self, is_done: Callable[[], object], what: str) -> None:
        act_until(lambda: self._run(self._new_salt()), is_done, what)

    @property
    def _is_serving(self) -> bool:
        return bool(self._scheduler.supervisor.lifecycles[0].phase.name == "SERVING")

    def _counted(self, what: str) -> float:
        return self.driver.metric(f"vllm:kv_connector_{what}", {"connector": "faulty"})

    def _heal(self) -> Iterator[str]:
        self._run(self._new_salt())
        self._reset_device()  # blocks of a load that the fault has promised are held until the child is isolated for it
        self._run_until(lambda: self._is_serving, "the return of the faulty child")
        salt = self._new_salt()
        if not self._equal(self._run(salt)):
            yield "a cold request after the fault differs"
        self._settle()
        self._reset_device()
        chosen = self._counted("chosen")
        output = self._run(salt)
        if not self._equal(output) or output["num_cached_tokens"] < RESTORABLE:
            yield "a request served after the fault differs or does not hit"
        if self._counted("chosen") <= chosen:
            yield "the faulty child does not load again"
        self._stored = salt

    def tables(self) -> dict[str, int]:
        """Entries left in all tables once nothing runs, and device blocks not free."""
        self._run(self._new_salt())
        self._settle()
        for _ in range(3):
            self.driver._step()
        self._reset_device()
        scheduler = self.driver.engine_core.scheduler
        return {
            "scheduler": tables.of_scheduler(scheduler.connector),
            "worker": tables.of_worker(get_kv_transfer_group()),
            "blocks": tables.blocks_in_use(scheduler),
        }


def main() -> int:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    cells_help = "so many of those that can fire, drawn by the seed; 0: all"
    parser.add_argument("--cells", type=int, default=0, help=cells_help)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hook", help="only this hook's")
    parser.add_argument("--child", choices=CHILDREN, default="ours", help="which connector is faulty")
    arguments = parser.parse_args()
    chosen = [cell for cell in cells() if arguments.hook in (None, cell[0])]
    if arguments.cells:
        chosen = [cell for cell in chosen if cell[0] not in NOT_CALLED]
        chosen = random.Random(arguments.seed).sample(chosen, arguments.cells)
    matrix, results = Matrix(arguments.model, arguments.seed, arguments.child), []
    for cell in chosen:
        result = matrix.run(*cell)
        results.append(result)
        print("CELL " + json.dumps(result), flush=True)
    bad = [result for result in results if result["wrong"]]
    fired = {result["cell"][0] for result in results if result["fired"]}
    left = matrix.tables()
    total = {
        "cells": len(results),
        "fired": sum(bool(result["fired"]) for result in results),
        "isolated": sum(result["isolated"] for result in results),
        "bad": len(bad),
        "never_fired": sorted({cell[0] for cell in chosen} - fired - set(NOT_CALLED)),
        "left": left,
    }
    print("TOTAL " + json.dumps(total), flush=True)
    forgotten = total["never_fired"] if len(chosen) == len(cells()) else []
    return 1 if bad or forgotten or any(left.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
