# SPDX-License-Identifier: Apache-2.0
"""An engine that restores from a disk tier alone: its prompts, its counters, and that it still works."""

import itertools

from tests.engine.client import Engine, Output, prompt
from tests.engine.restore import assert_restored
from tests.waiting import until

LENGTH = 150
MAX_TOKENS = 3


def counted(engine: Engine, name: str, **labels: str) -> float:
    return engine.metric(f"vllm:hybrid_offload_{name}", connector="disk", **labels)


def stored(engine: Engine, seed: int) -> tuple[list[int], Output]:
    """A prompt that is on disk and not in the device cache, and its output."""
    tokens = prompt(LENGTH, seed)
    cold = engine.generate(tokens, MAX_TOKENS)
    engine.evict()
    return tokens, cold


def works(engine: Engine, seed: int) -> None:
    """What is stored is restored. A write may need a second: room comes with the bookkeeper's next turn."""
    attempts = itertools.count(1000 * seed)

    def is_restored() -> bool:
        tokens, cold = stored(engine, next(attempts))
        restored = engine.generate(tokens, MAX_TOKENS)
        assert restored.same_as(cold)
        if restored.num_cached_tokens:
            assert_restored(cold, restored, LENGTH)
        return restored.num_cached_tokens > 0

    until(is_restored, "a store that is restored")
