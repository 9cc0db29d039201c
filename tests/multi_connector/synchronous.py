# SPDX-License-Identifier: Apache-2.0
"""A third party's synchronous load that fails, on the tiny hybrid model (four KV cache groups).

    python -m tests.multi_connector.synchronous MODEL [--beside-tier] [--seed S]

Alone, for each kind of fault and each shape of the local hit: the child writes noise where it should load and then
fails in ``start_load_kv``. The request must equal the uncached run, so must one beside it, and one after it that hits
nothing external. With the fault off, the child must come back and load.

Beside a CPU tier of ours, for each way to tell of the failure: in the passes that compute from the noise, the tier
copies out what they compute. The request must equal the uncached run; so must a later one that the tier restores.

One JSON line a cell, then one with the totals.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.engine.client import cpu_child, multi
from tests.multi_connector import tables
from tests.multi_connector.fakes import Boom, Panic
from tests.multi_connector.faulty import HANG_AFTER_S, HANG_S, HookClock
from tests.patches.lab import Lab, LabConnector, N, near, prompt, same
from tests.waiting import until

RETRY = {"retry_first_s": 0.01, "retry_longest_s": 0.01}
KINDS = ("raises", "panics", "hangs", "raises and cannot be shut down")
LENGTHS = {"no local hit": 0, "a local hit of one block": N, "a local hit inside a block": 1088}
LENGTH = 2 * N + 192
ATTEMPTS = 3
"""What ``max_load_attempts`` is by default."""


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


def _all_blocks(loaded: list[tuple[list[int], ...]]) -> set[int]:
    return {block for block_ids in loaded for group in block_ids for block in group if block}


def _raises(loaded: Any) -> Any:
    raise Boom("get_block_ids_with_load_errors")


WAYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "by its blocks": ("bad_blocks", _all_blocks),
    "by its request": ("report", lambda loaded: KVConnectorTransferResults(failed_recving=loaded)),
    "by an exception": ("bad_blocks", _raises),
}
"""How a failed load is told: the attribute of LabConnector and its value."""


class Cells:
    """One engine, one cell after the other."""

    def __init__(self, seed: int, *others: dict[str, Any], **settings: Any) -> None:
        third_party = {
            "kv_connector": "Synchronous",
            "kv_connector_module_path": "tests.multi_connector.synchronous",
            "kv_connector_extra_config": {"name": "lab", "load_weight": 10.0},
        }
        self.lab = Lab(multi(third_party, *others, **RETRY, **settings))
        self.connector = self.lab.scheduler.connector
        HookClock.measure(self.connector, get_kv_transfer_group())
        self.tokens, self.other = prompt(LENGTH, seed), prompt(40, seed + 1)
        LabConnector.asynchronous = False
        self.cold = self.lab.run(self.tokens)[0]
        LabConnector.stores = False
        self.together, self.beside = self._without_loads(self.tokens, self.other)

    def _without_loads(self, *prompts: list[int]) -> list[dict[str, Any]]:
        LabConnector.answer = lambda *_: (0, False)
        try:
            return self.lab.run(*prompts)
        finally:
            LabConnector.answer = None

    def _serves(self) -> bool:
        """Whether the child is in service; if not, it steps."""
        if all(child.in_service for child in self.connector._children):
            return True
        self._without_loads(prompt(8, seed=99))
        return False

    def alone(self) -> Iterator[dict[str, Any]]:
        for kind in KINDS:
            for shape, num_local in LENGTHS.items():
                self.lab.reset()
                if num_local:
                    self._without_loads(self.tokens[: num_local + 8])
                fired = Synchronous.fired
                Synchronous.fault = kind
                failed, beside = self.lab.run(self.tokens, self.other)
                Synchronous.fault = ""
                again = self._without_loads(self.tokens)[0]
                until(self._serves, "the child's return")
                self.lab.reset()
                restored = self.lab.run(self.tokens)[0]
                checks = {
                    "failed": near(failed, self.together),
                    "beside": near(beside, self.beside),
                    "again": near(again, self.cold),  # a hit of what was computed in a batch
                    "fired": Synchronous.fired == fired + 1,
                    "restored": same(restored, self.cold) and restored["cached"] >= 2 * N,
                }
                yield _cell(f"{kind}, {shape}", checks)

    def beside_a_tier(self) -> Iterator[dict[str, Any]]:
        for way, (attribute, told) in WAYS.items():
            self.lab.reset_all()
            LabConnector.attempts.clear()
            LabConnector.load = lambda request_id: "noise"
            setattr(LabConnector, attribute, told)
            failed = self.lab.run(self.tokens)[0]
            attempts = len(LabConnector.attempts)
            setattr(LabConnector, attribute, None)
            self.lab.reset()
            restored = self._without_loads(self.tokens)[0]
            checks = {
                "failed": same(failed, self.cold),
                "restored": same(restored, self.cold) and restored["cached"] >= 2 * N,
                # An isolated child is not asked again at once.
                "attempts": 1 <= attempts <= ATTEMPTS,
            }
            yield _cell(way, checks)

    def left(self) -> dict[str, int]:
        self._without_loads(prompt(8, seed=99))  # a step more, in which the last request is forgotten
        self.lab.reset()
        blocks = tables.blocks_in_use(self.lab.scheduler)
        return {"scheduler": tables.of_scheduler(self.connector), "blocks": blocks}


def _cell(name: str, checks: dict[str, bool]) -> dict[str, Any]:
    return {"cell": name, "wrong": [what for what, right in checks.items() if not right]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--beside-tier", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["TINY_MODEL"] = arguments.model
    # As the engine imports it, not as this program: both would have their own switches.
    from tests.multi_connector.synchronous import Cells, Synchronous

    if arguments.beside_tier:
        tier = cpu_child(capacity_bytes="256 MiB")
        engine = Cells(arguments.seed, tier)
        cells = list(engine.beside_a_tier())
    else:
        engine = Cells(arguments.seed, hang_after_s=HANG_AFTER_S)
        cells = list(engine.alone())
    for cell in cells:
        print("CELL " + json.dumps(cell), flush=True)
    total = {"cells": len(cells), "fired": Synchronous.fired, "left": engine.left()}
    print("TOTAL " + json.dumps(total), flush=True)


if __name__ == "__main__":
    main()
