# SPDX-License-Identifier: Apache-2.0
"""When to try again what has failed: after a pause that doubles from one failure to the next, up to a bound. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """The pauses of one thing that may fail. All times are seconds of one monotonic clock."""

    first_s: float
    longest_s: float
    _failures: int = 0
    _failed_at: float = 0.0
    _succeeded_at: float = 0.0

    @property
    def pause_s(self) -> float:
        """How long to wait after the latest failure; 0.0 before the first."""
        # Capped before the power is taken: a child may fail for weeks.
        return min(self.first_s * 2.0 ** min(self._failures - 1, 64), self.longest_s) if self._failures else 0.0

    def failed(self, now: float) -> None:
        """It failed. Working for as long as the longest pause before that makes this a first failure again."""
        if now - self._succeeded_at >= self.longest_s and self._succeeded_at > self._failed_at:
            self._failures = 0
        self._failures += 1
        self._failed_at = now

    def remaining_s(self, now: float) -> float:
        """Seconds of the pause that are left."""
        return max(0.0, self._failed_at + self.pause_s - now) if self._failures else 0.0

    def may_try(self, now: float) -> bool:
        """Whether the pause is over."""
        return not self.remaining_s(now)

    def succeeded(self, now: float) -> None:
        """It works again."""
        self._succeeded_at = now
