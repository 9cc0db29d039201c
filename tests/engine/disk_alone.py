# SPDX-License-Identifier: Apache-2.0
"""An engine that restores from a disk tier alone: its prompts, its counters, and that it still works."""

import itertools
import time

from tests.engine.client import Engine, Output, prompt
from tests.engine.restore import assert_restored

LENGTH = 150
MAX_TOKENS = 3


def counted(engine: Engine, name: str, **labels: str) -> float:
    return engine.metric(f"vllm:hybrid_offload_{name}", connector="disk", **labels)


def stored(engine: Engine, seed: int) -> tuple[list[int], Output]:
    """A prompt that is on disk and not in the device cache, and its output."""
    tokens = prompt(LENGTH, seed)
    cold = engine.generate(tokens, MAX_TOKENS)
    engine.wait_for_stores()
    engine.reset_device_cache()
    return tokens, cold


def works(engine: Engine, seed: int) -> None:
    """What is stored is restored. A write may need a second: room comes with the bookkeeper's next turn."""
    deadline = time.monotonic() + 60
    for attempt in itertools.count():
        tokens, cold = stored(engine, 1000 * seed + attempt)
        restored = engine.generate(tokens, MAX_TOKENS)
        assert restored.same_as(cold)
        if restored.num_cached_tokens:
            assert_restored(cold, restored, LENGTH)
            return
        assert time.monotonic() < deadline, "the tier does not store any more"
        engine.call("rest", seconds=0.2)
