# SPDX-License-Identifier: Apache-2.0
"""What loading and computing tokens costs, measured while serving. Pure: no clock, no vLLM.

Both are straight lines, seconds = a + b x tokens, fitted as measurements come: each new one makes the older ones count
2 % less, so that a line follows a disk that becomes slower.
"""

from dataclasses import dataclass

_MEMORY = 0.98
_OPTIMISM = 0.99
ENOUGH = 3
"""Measurements below which a line is not believed."""


@dataclass(slots=True)
class Line:
    """A least-squares fit of seconds over tokens, neither coefficient below 0."""

    count: int = 0
    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        """One measurement."""
        self.count += 1
        self._weight = self._weight * _MEMORY + 1
        self._x = self._x * _MEMORY + tokens
        self._y = self._y * _MEMORY + seconds
        self._xx = self._xx * _MEMORY + tokens * tokens
        self._xy = self._xy * _MEMORY + tokens * seconds

    @property
    def is_known(self) -> bool:
        return self.count >= ENOUGH

    def coefficients(self) -> tuple[float, float]:
        """(a, b): seconds, and seconds a token."""
        if not self.count:
            return 0.0, 0.0
        spread = self._weight * self._xx - self._x**2
        # All measurements of one size, up to rounding: they say nothing of a.
        if spread <= 1e-9 * self._weight * self._xx:
            return 0.0, self._xy / self._xx if self._xx else 0.0
        b = (self._weight * self._xy - self._x * self._y) / spread
        a = (self._y - b * self._x) / self._weight
        if a < 0:
            return 0.0, max(self._xy / self._xx, 0.0)
        if b < 0:
            return self._y / self._weight, 0.0
        return a, b

    def seconds(self, tokens: float) -> float:
        a, b = self.coefficients()
        return a + b * tokens


class LoadCost:
    """One child's: what its loads took, and until enough have been seen what its weight promises."""

    def __init__(self, promise: float) -> None:
        """``promise``: the share of the time that computing takes which the child is taken to save, 0 to 1."""
        self._promise = promise
        self.line = Line()
        self._discount = 1.0

    def measured(self, tokens: int, seconds: float) -> None:
        self.line.add(tokens, seconds)
        self._discount = 1.0

    def lost_to_computing(self) -> None:
        """Only a load can correct a line, so each time that computing is preferred the line counts 1 % less.

        A child that has become fast again is so tried again, after some 70 refusals for one that was twice too slow.
        """
        self._discount *= _OPTIMISM

    def saved_s(self, tokens: int, prefill_s: float) -> float:
        """Seconds expected to be saved by loading ``tokens`` that would take ``prefill_s`` to compute."""
        if not self.line.is_known:
            return self._promise * prefill_s
        return prefill_s - self.line.seconds(tokens) * self._discount
