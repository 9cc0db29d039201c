# SPDX-License-Identifier: Apache-2.0
"""What is foretold of a server: a chat of two turns, and between them prompts that take the device cache."""

import pytest

from bench.scaled_trace import ScaledRequest
from bench.serving_forecast import forecast
from bench.serving_sides import MATCH_UNIT, NONE, OFFLOADING, Side, Sizes, ours

FIRST = tuple(range(200)) * 5
AGAIN = (FIRST + tuple(range(50)))[: len(FIRST) + 50]
OTHERS = [tuple(range(place, 250)) * 12 for place in range(1, 7)]
PROMPTS = [FIRST, *OTHERS, AGAIN]
LRU, LEARNED = ours(["lru", "learned"], ["always"])
REUSABLE = (len(FIRST) - 1) // MATCH_UNIT * MATCH_UNIT


def requests() -> list[ScaledRequest]:
    return [ScaledRequest(float(place), prompt, 4) for place, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    ("side", "sizes", "tokens"),
    [
        (NONE, Sizes(8, 0, 0), 0),
        (NONE, Sizes(1000, 0, 0), REUSABLE),
        (LRU, Sizes(8, 1 << 20, 64 << 20), REUSABLE),
        (LRU, Sizes(8, 64 << 20, 1 << 20), 0),
        (LEARNED, Sizes(8, 1 << 20, 64 << 20), REUSABLE),
        (Side("CPU tier", cpu=True, policy="lru"), Sizes(8, 64 << 20, 0), REUSABLE),
        (OFFLOADING, Sizes(8, 64 << 20, 64 << 20), None),
    ],
    ids=["small device", "large device", "lru", "tier too small", "learned", "CPU tier alone", "vLLM's own tiers"],
)
def test_what_the_last_turn_finds_depends_on_what_has_room(side: Side, sizes: Sizes, tokens: int | None) -> None:
    assert forecast(requests(), side, sizes) == tokens
