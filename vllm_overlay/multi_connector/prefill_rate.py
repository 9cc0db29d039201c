# SPDX-License-Identifier: Apache-2.0
"""What computing a prompt's token takes, from the times of engine steps. Pure: no clock, no vLLM."""

import statistics
from collections import deque

_STEPS = 16
_ENOUGH = 3
_LARGE = 4
"""A step counts if it computes at least the largest's tokens divided by this: small ones cost more a token."""


class PrefillRate:
    """The median over the last large steps, so that neither a first step's compilation nor a pause counts."""

    def __init__(self) -> None:
        self._largest = 0
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self.seconds_per_token: float | None = None
        """None until three steps have been seen."""

    def step_ended(self, tokens: int, seconds: float) -> None:
        """A step that mostly computed prompts took ``seconds`` for ``tokens``."""
        self._largest = max(self._largest, tokens)
        if tokens * _LARGE < self._largest or seconds <= 0:
            return
        self._steps.append(seconds / tokens)
        if len(self._steps) >= _ENOUGH:
            self.seconds_per_token = statistics.median(self._steps)
