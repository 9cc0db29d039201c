# SPDX-License-Identifier: Apache-2.0
"""When to try again what has failed: after a pause that doubles from one failure to the next, up to a bound. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """The pauses of one thing that may fail. All times are seconds of one monotonic clock."""

    first_s: float
    longest_s: float
    _failures: int = 0
    _tripped_at: float = 0.0
    _closed_at: float = 0.0

    @property
    def pause_s(self) -> float:
        """How long the latest failure keeps it open."""
        # Capped before the power is taken: a child may fail for weeks.
        return min(self.first_s * 2.0 ** min(self._failures - 1, 64), self.longest_s) if self._failures else 0.0

    def trip(self, now: float) -> None:
        """It failed. Working for as long as the longest pause before that makes this a first failure again."""
        if now - self._closed_at >= self.longest_s and self._closed_at > self._tripped_at:
            self._failures = 0
        self._failures += 1
        self._tripped_at = now

    def may_try(self, now: float) -> bool:
        return now - self._tripped_at >= self.pause_s

    def close(self, now: float) -> None:
        """It works again."""
        self._closed_at = now
