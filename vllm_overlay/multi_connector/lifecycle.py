# SPDX-License-Identifier: Apache-2.0
"""The life of one child as the scheduler directs it: a circuit breaker with the workers in its loop. Pure.

    SERVING --isolate--> STOPPING --all ranks have stopped it--> OPEN --the pause is over--> HALF_OPEN --> SERVING
                            ^                                                                    |
                            +------------------- it failed again, here or on a rank -------------+

A child that comes back is a new instance, on the scheduler and on every rank. Its *generation* goes up by one when it
becomes half open. The scheduler sends an ``Order`` for each child with each step's metadata. A rank's answer names the
orders it has seen, so an answer to an older order is not taken for one to the present order.
"""

from dataclasses import dataclass
from enum import Enum

from vllm_overlay.common.backoff import Backoff


class Duty(Enum):
    """What a rank has to do with its instance of a child."""

    SERVE = "serve"
    STOP = "stop"
    STAND_BY = "stand by"
    """Build the new instance; give it no work yet."""


@dataclass(slots=True, frozen=True)
class Order:
    """Scheduler to ranks, one a child and step."""

    generation: int
    duty: Duty


class Phase(Enum):
    """Where a child is in its life; the values are those of the gauge ``vllm:kv_connector_state``."""

    SERVING = 0
    """The closed circuit breaker: every hook that does something is called."""
    STOPPING = 1
    """It has failed, and some rank's instance may still touch blocks."""
    OPEN = 2
    """No instance can touch a block; the pause runs."""
    HALF_OPEN = 3
    """The scheduler has a new instance, which waits for the ranks' new instances."""


_DUTIES = {
    Phase.SERVING: Duty.SERVE,
    Phase.STOPPING: Duty.STOP,
    Phase.OPEN: Duty.STOP,
    Phase.HALF_OPEN: Duty.STAND_BY,
}


class Lifecycle:
    """One child. ``Supervisor`` builds the scheduler's own instance and then calls ``half_open`` and ``serve``."""

    def __init__(self, backoff: Backoff) -> None:
        self.backoff = backoff
        self.phase = Phase.SERVING
        self.generation = 0
        self.order = Order(0, Duty.SERVE)
        self.sent = True
        """Whether the ranks have been sent the present order."""

    @property
    def needs_steps(self) -> bool:
        """Whether an idle engine should go on stepping for it: to send an order, or to hear an answer that will come.

        Not while it is open or while a rank cannot stop it: either may last, and an idle engine would spin.
        """
        return not self.sent or self.phase is Phase.HALF_OPEN

    def isolate(self, now: float) -> bool:
        """It has failed in some process. True when it was in service until now."""
        was_serving = self.phase is Phase.SERVING
        if was_serving or self.phase is Phase.HALF_OPEN:
            self.backoff.failed(now)
            self._enter(Phase.STOPPING)
        return was_serving

    def stopped(self) -> None:
        """All ranks have stopped their instances."""
        if self.phase is Phase.STOPPING:
            self.phase = Phase.OPEN  # the order stays the same

    def may_try(self, now: float) -> bool:
        """Whether the pause is over."""
        return self.phase is Phase.OPEN and self.backoff.may_try(now)

    def attempt_failed(self, now: float) -> None:
        """The scheduler could not build its own instance: the ranks need not hear of this attempt."""
        self.backoff.failed(now)

    def half_open(self) -> None:
        """The scheduler has built its own instance."""
        self.generation += 1
        self._enter(Phase.HALF_OPEN)

    def serve(self, now: float) -> None:
        """All processes have an instance."""
        self.backoff.succeeded(now)
        self._enter(Phase.SERVING)

    def _enter(self, phase: Phase) -> None:
        self.phase, self.sent = phase, False
        self.order = Order(self.generation, _DUTIES[phase])
