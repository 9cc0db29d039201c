# SPDX-License-Identifier: Apache-2.0
"""A third party's synchronous load fails beside a CPU tier of ours, on the tiny hybrid model.

    python -m tests.multi_connector.failed_beside_tier MODEL [--seed S]

For each way to tell of the failure: the third party writes noise where it should load, three times, and the request is
computed in the end. In the same passes the tier copies out what was computed from the noise. The request must equal the
uncached run; so must a later one that the tier restores. One JSON line a cell, then one with the totals.
"""

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from tests.multi_connector import tables
from tests.multi_connector.fakes import Boom
from tests.patches.lab import Lab, LabConnector, N, prompt, same

LENGTH = 2 * N + 30
ATTEMPTS = 3
"""What ``max_load_attempts`` is by default."""


def _all_blocks(loaded: list[tuple[list[int], ...]]) -> set[int]:
    return {block for block_ids in loaded for group in block_ids for block in group if block}


def _raise(hook: str) -> Callable[[Any], Any]:
    def load(_: Any) -> Any:
        raise Boom(hook)

    return load


WAYS: dict[str, dict[str, Any]] = {
    "by its blocks": {"bad_blocks": _all_blocks},
    "by its request": {"report": lambda loaded: KVConnectorTransferResults(failed_recving=loaded)},
    "by an exception": {"bad_blocks": _raise("get_block_ids_with_load_errors")},
}


def config() -> dict[str, Any]:
    """The third party, which is preferred, and the tier."""
    third_party = {
        "kv_connector": "LabConnector",
        "kv_connector_module_path": "tests.patches.lab",
        "kv_connector_extra_config": {"name": "lab", "load_weight": 10.0},
    }
    tier = {
        "kv_connector": "HybridOffloadConnector",
        "kv_connector_module_path": "vllm_overlay.connector.connector",
        "kv_connector_extra_config": {"tier": "cpu", "capacity_bytes": 256 << 20},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "vllm_overlay.multi_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [third_party, tier],
            "retry_first_s": 0.01,
            "retry_longest_s": 0.01,
        },
    }


class Cells:
    """One engine, one way after the other."""

    def __init__(self, seed: int) -> None:
        LabConnector.asynchronous = False
        self.lab = Lab(config())
        self.tokens = prompt(LENGTH, seed)
        self.cold = self.lab.run(self.tokens)[0]
        LabConnector.stores = False

    def run(self, way: str) -> dict[str, Any]:
        """What is not as it should be."""
        self.lab.reset_all()
        LabConnector.attempts.clear()
        LabConnector.answer, LabConnector.load = None, lambda request_id: "noise"
        for name, told in WAYS[way].items():
            setattr(LabConnector, name, told)
        failed = self.lab.run(self.tokens)[0]
        attempts = len(LabConnector.attempts)
        for name in WAYS[way]:
            setattr(LabConnector, name, None)
        LabConnector.answer = lambda *_: (0, False)
        self.lab.reset()
        restored = self.lab.run(self.tokens)[0]
        checks = {
            "failed": same(failed, self.cold),
            "restored": same(restored, self.cold) and restored["cached"] >= 2 * N,
            # An isolated child is not asked again at once.
            "attempts": 1 <= attempts <= ATTEMPTS,
        }
        wrong = [name for name, right in checks.items() if not right]
        return {"way": way, "attempts": attempts, "cached": restored["cached"], "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["TINY_MODEL"] = arguments.model
    # As the engine imports it, not as this program: both would have their own switches.
    from tests.multi_connector import failed_beside_tier

    engine = failed_beside_tier.Cells(arguments.seed)
    cells = [engine.run(way) for way in failed_beside_tier.WAYS]
    for cell in cells:
        print("CELL " + json.dumps(cell), flush=True)
    engine.lab.run(prompt(8, seed=99))  # a step more, in which the last request is forgotten
    left = tables.of_scheduler(engine.lab.scheduler.connector)
    print("TOTAL " + json.dumps({"cells": len(cells), "left": left}), flush=True)


if __name__ == "__main__":
    main()
