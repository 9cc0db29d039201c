# SPDX-License-Identifier: Apache-2.0
"""Seconds in the hooks of one child in one process."""

from collections import defaultdict

REPORT_EVERY_S = 1.0
"""A report with every step would cost more than most hooks do."""


class HookTimes:
    """Added up here, and handed on about once a second while the engine steps. An idle engine keeps the rest."""

    __slots__ = ("_seconds", "_taken_at")

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._taken_at: float | None = None

    def add(self, hook: str, seconds: float) -> None:
        self._seconds[hook] += seconds

    def take(self, now: float) -> dict[str, float]:
        """Seconds by hook since they were last handed on. Empty before a second has passed since then."""
        if self._taken_at is None:
            self._taken_at = now
        if now - self._taken_at < REPORT_EVERY_S:
            return {}
        taken, self._seconds, self._taken_at = dict(self._seconds), defaultdict(float), now
        return taken
