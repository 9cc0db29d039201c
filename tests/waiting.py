# SPDX-License-Identifier: Apache-2.0
"""How tests wait for what other threads and processes do: for a condition, never for a time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 240.0
"""The one limit. It is for what fails: a machine that is busy with other things must not reach it."""
_FIRST_PAUSE_S = 0.001


def until(predicate: Callable[[], T], what: str = "the condition", longest_pause_s: float = 0.05) -> T:
    """Asks until the answer is true, and returns it. ``what`` is the subject of the sentence that a failure says.

    What works while it is asked, such as the step of an engine, takes no ``longest_pause_s``.
    """
    end, pause = time.monotonic() + PATIENCE_S, _FIRST_PAUSE_S
    while not (answer := predicate()):
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come within {PATIENCE_S:.0f} s")
        time.sleep(min(pause, longest_pause_s))
        pause *= 1.25
    return answer
