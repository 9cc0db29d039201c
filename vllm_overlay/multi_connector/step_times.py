# SPDX-License-Identifier: Apache-2.0
"""How long engine steps take that compute prompts: between the scheduler's plan and the workers' answer to it."""

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class StepTimes:
    """The steps under way. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[float, int]] = deque(maxlen=8)
        self._last_ended = 0.0

    def planned(self, output: "SchedulerOutput", now: float) -> None:
        """Remembers a step that computes. One that mostly decodes says nothing of prefill."""
        tokens = output.total_num_scheduled_tokens
        if tokens:
            is_prefill = tokens > 2 * len(output.num_scheduled_tokens)
            self._under_way.append((now, tokens if is_prefill else 0))

    def ended(self, now: float) -> tuple[int, float] | None:
        """The oldest step has ended: its tokens and seconds, or None when it says nothing of prefill."""
        if not self._under_way:
            return None
        planned_at, tokens = self._under_way.popleft()
        # Steps overlap with asynchronous scheduling: the later of both beginnings.
        started, self._last_ended = max(planned_at, self._last_ended), now
        return (tokens, now - started) if tokens else None
