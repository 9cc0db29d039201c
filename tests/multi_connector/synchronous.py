# SPDX-License-Identifier: Apache-2.0
"""A third party's synchronous load that fails in the middle, on the tiny hybrid model (four KV cache groups).

    python -m tests.multi_connector.synchronous MODEL [--seed S]

For each kind of fault and each shape of the local hit: the child writes noise where it should load and then fails in
``start_load_kv``. The request must equal the uncached run, so must one beside it, and one after it that hits nothing
external. With the fault off, the child must come back and load. One JSON line a cell, then one with the totals.
"""

import argparse
import json
import os
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from tests.multi_connector import tables
from tests.multi_connector.fakes import Boom, Panic
from tests.multi_connector.faulty import HANG_AFTER_S, HANG_S, HookClock
from tests.patches.lab import Lab, LabConnector, N, near, prompt, same
from tests.waiting import until

RETRY_S = 0.01
KINDS = ("raises", "panics", "hangs", "raises and cannot be shut down")
LENGTHS = {"no local hit": 0, "a local hit of one block": N, "a local hit inside a block": 1088}
LENGTH = 2 * N + 192


class Synchronous(LabConnector):
    """Loads at once. ``fault`` says how a load fails after a part of it is written."""

    fault: str = ""
    fired: int = 0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not Synchronous.fault or not self._get_connector_metadata().loads:
            return super().start_load_kv(forward_context, **kwargs)
        Synchronous.fired += 1
        LabConnector.load = lambda request_id: "noise"
        super().start_load_kv(forward_context, **kwargs)
        LabConnector.load = lambda request_id: "right"
        if Synchronous.fault == "hangs":
            HookClock.now += HANG_S
        elif Synchronous.fault == "panics":
            raise Panic("start_load_kv")
        else:
            raise Boom("start_load_kv")

    def shutdown(self) -> None:
        if Synchronous.fault.endswith("cannot be shut down"):
            raise Boom("shutdown")


def config() -> dict[str, Any]:
    """The connector alone under a MultiConnector."""
    child = {
        "kv_connector": "Synchronous",
        "kv_connector_module_path": "tests.multi_connector.synchronous",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"name": "lab"},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "vllm_overlay.multi_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [child],
            "hang_after_s": HANG_AFTER_S,
            "retry_first_s": RETRY_S,
            "retry_longest_s": RETRY_S,
        },
    }


class Cell:
    """One engine, one cell after the other."""

    def __init__(self, seed: int) -> None:
        self.lab = Lab(config())
        HookClock.measure(self.lab.scheduler.connector, get_kv_transfer_group())
        self.tokens, self.other = prompt(LENGTH, seed), prompt(40, seed + 1)
        LabConnector.asynchronous = False
        self.cold = self.lab.run(self.tokens)[0]
        LabConnector.stores = False
        with_nothing = self._without_loads(self.tokens, self.other)
        self.together, self.beside = with_nothing

    def _without_loads(self, *prompts: list[int]) -> list[dict[str, Any]]:
        LabConnector.answer = lambda *_: (0, False)
        try:
            return self.lab.run(*prompts)
        finally:
            LabConnector.answer = None

    def _serves(self) -> bool:
        """Whether the child is in service; if not, it steps."""
        if all(child.in_service for child in self.lab.scheduler.connector._children):
            return True
        self._without_loads(prompt(8, seed=99))
        return False

    def run(self, kind: str, num_local: int) -> dict[str, Any]:
        """What is not as it should be."""
        wrong: list[str] = []
        self.lab.reset()
        if num_local:
            self._without_loads(self.tokens[: num_local + 8])
        fired = Synchronous.fired
        Synchronous.fault = kind
        failed, beside = self.lab.run(self.tokens, self.other)
        Synchronous.fault = ""
        again = self._without_loads(self.tokens)[0]
        for name, right in (
            ("failed", near(failed, self.together)),
            ("beside", near(beside, self.beside)),
            ("again", same(again, self.cold)),
            ("fired", Synchronous.fired == fired + 1),
        ):
            if not right:
                wrong.append(name)
        until(self._serves, "the child's return")
        self.lab.reset()
        restored = self.lab.run(self.tokens)[0]
        if not same(restored, self.cold) or restored["cached"] < 2 * N:
            wrong.append("restored")
        return {"kind": kind, "num_local": num_local, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["TINY_MODEL"] = arguments.model
    # As the engine imports it, not as this program: both would have their own switches.
    from tests.multi_connector import synchronous

    engine = synchronous.Cell(arguments.seed)
    cells = [engine.run(kind, num_local) for kind in KINDS for num_local in LENGTHS.values()]
    for cell in cells:
        print("CELL " + json.dumps(cell), flush=True)
    connector = engine.lab.scheduler.connector
    pool = engine.lab.scheduler.kv_cache_manager.block_pool
    engine.lab.reset()
    left = {
        "scheduler": tables.of_scheduler(connector),
        "blocks": len(pool.blocks) - 1 - pool.get_num_free_blocks(),
    }
    print(
        "TOTAL " + json.dumps({"cells": len(cells), "fired": synchronous.Synchronous.fired, "left": left}), flush=True
    )


if __name__ == "__main__":
    main()
