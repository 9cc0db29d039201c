# SPDX-License-Identifier: Apache-2.0
"""Attention and states of a prompt leave the device cache in turn; the connector has nothing."""

import logging
from typing import Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

from tests.patches.lab import Lab, LabConnector, conclude, error_of, prompt, same

SYMPTOM = "the hit ends at the minimum, and no metric and no line of the log names the group that is to blame"

LOGGER = logging.getLogger("vllm.v1.core.kv_cache_manager")


class Lines(logging.Handler):
    """What the cache manager says."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def count_lookups() -> list[int]:
    """Grows by one at each lookup of all groups, which a line of the log costs."""
    calls: list[int] = []
    original = HybridKVCacheCoordinator.find_longest_cache_hit_per_group

    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(len(calls))
        return original(self, *arguments)

    HybridKVCacheCoordinator.find_longest_cache_hit_per_group = counted
    return calls


def main() -> None:
    lab = Lab()
    LabConnector.answer = lambda *_: (0, False)
    lookups, said = count_lookups(), Lines()
    LOGGER.addHandler(said)
    tokens = prompt(2344, seed=1)
    cold = lab.run(tokens)[0]
    hits, right, errors = [], [], []

    def hit_without(kind: str, first: int) -> None:
        lab.forget(kind, first)
        errors.append(error_of(lambda: right.append(lab.run(tokens)[0])))
        hits.append(right[-1]["cached"])

    for kind, first in ("Mamba", 0), ("FullAttention", 1), ("Mamba", 0):
        hit_without(kind, first)
    quiet = not said.lines and not lookups
    LOGGER.setLevel(logging.DEBUG)
    hit_without("Mamba", 0)
    spoken = [line for line in said.lines if "mamba" in line and "2304" in line]
    counted = {
        metric.labels["kind"]: metric.value
        for metric in lab.llm.get_metrics()
        if metric.name == "vllm:prefix_cache_hits_ended"
    }
    sound = not any(errors) and hits == [0] * 4 and all(same(answer, cold) for answer in right)
    conclude(
        sound and not counted and not said.lines,
        sound and quiet and len(spoken) == len(said.lines) == 1 and counted == {"mamba": 4},
        hits=hits,
        counted=counted,
        lines=said.lines,
    )


if __name__ == "__main__":
    main()
