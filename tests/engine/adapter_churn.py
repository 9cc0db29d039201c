# SPDX-License-Identifier: Apache-2.0
"""The long form of test_adapters.py: ``python -m tests.engine.adapter_churn MODEL --steps 80 --seed 1``.

One adapter's weights change at random under its name and path, in place and under new ids, between restores and while
one is under way, with a restart in the middle. Every request that the device cache cannot have misled must equal what
an engine without a connector computes with the weights that are loaded.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.adapters import RANK, make_adapter
from tests.engine.client import Engine, Output, cpu_child, disk_child, multi, prompt

PROMPTS = [prompt(length, seed=length) for length in (300, 700, 1300)]
VERSIONS = 3
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": RANK}


class Churn:
    """One adapter whose files and id change."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory = directory / "adapter"
        self._random = random.Random(seed)
        self._number = 0
        self._version = 0
        self.total = {"requests": 0, "restored": 0, "wrong": 0, "caught": 0, "hook_errors": 0}

    @property
    def adapter(self) -> dict[str, Any]:
        return {"lora_name": "adapter", "lora_int_id": self._number, "lora_path": str(self._directory)}

    def _change(self, engine: Engine, version: int, *, new_id: bool) -> None:
        self._version = version
        self._number += new_id
        make_adapter(self._directory, seed=version)
        engine.call("load_adapter", adapter=self.adapter, in_place=True)

    def cold_runs(self, engine: Engine) -> dict[tuple[int, int], Output]:
        """What each version answers to each prompt. ``engine`` has no connector."""
        cold = {}
        for version in range(VERSIONS):
            self._change(engine, version, new_id=version == 0)
            engine.reset_device_cache()
            for index, tokens in enumerate(PROMPTS):
                cold[version, index] = engine.generate(tokens, adapter=self.adapter)
        return cold

    def run(self, engine: Engine, cold: dict[tuple[int, int], Output], steps: int) -> None:
        self._change(engine, self._random.randrange(VERSIONS), new_id=False)
        for _ in range(steps):
            if self._random.random() < 0.25:
                self._change_somehow(engine)
            if self._random.random() < 0.5:  # may be served by what the device cache has of other weights
                engine.generate(self._random.choice(PROMPTS), adapter=self.adapter)
            self._judge(engine, cold)
        self.total["caught"] += int(engine.metric("vllm:hybrid_offload_failed_loads", reason="adapter"))
        self.total["hook_errors"] += int(engine.metric("vllm:hybrid_offload_hook_errors"))
        engine.wait_for_stores()

    def _change_somehow(self, engine: Engine) -> None:
        version = self._random.randrange(VERSIONS)
        if self._random.random() < 0.5:
            make_adapter(self._directory, seed=version)
            engine.reset_device_cache()
            engine.call("fault", name="reload_adapter_during_a_load", tier="cpu", adapter=self.adapter)
            engine.generate(self._random.choice(PROMPTS), adapter=self.adapter)
        self._change(engine, version, new_id=self._random.random() < 0.3)

    def _judge(self, engine: Engine, cold: dict[tuple[int, int], Output]) -> None:
        engine.reset_device_cache()
        index = self._random.randrange(len(PROMPTS))
        output = engine.generate(PROMPTS[index], adapter=self.adapter)
        self.total["requests"] += 1
        self.total["restored"] += output.num_cached_tokens > 0
        self.total["wrong"] += not output.same_as(cold[self._version, index])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=80, help="steps before, and again after, the restart")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        churn = Churn(Path(directory), arguments.seed)
        with Engine(arguments.model, **OPTIONS) as engine:
            cold = churn.cold_runs(engine)
        config = multi(cpu_child(), disk_child(Path(directory) / "root"))
        for _ in range(2):
            with Engine(arguments.model, kv_transfer_config=config, **OPTIONS) as engine:
                churn.run(engine, cold, arguments.steps)
    print("TOTAL " + json.dumps(churn.total))
    return 1 if churn.total["wrong"] or churn.total["hook_errors"] or not churn.total["caught"] else 0


if __name__ == "__main__":
    sys.exit(main())
