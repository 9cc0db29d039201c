# SPDX-License-Identifier: Apache-2.0
"""The life of one child as the scheduler directs it, in step with the workers. Pure.

    SERVING --isolate--> STOPPING --all ranks have stopped it--> RESTING --the pause is over--> ON_TRIAL --> SERVING
                            ^                                                                      |
                            +-------------------- it failed again, here or on a rank --------------+

A child that comes back is a new instance, on the scheduler and on every rank: its *generation* goes up by one when it
is put on trial. The scheduler sends an ``Order`` for each child with each step's metadata; a rank's answer names the
orders it has seen, so that an answer to an older order is not taken for one to the present order.
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
    STOPPING = 1
    RESTING = 2
    ON_TRIAL = 3


_DUTIES = {
    Phase.SERVING: Duty.SERVE,
    Phase.STOPPING: Duty.STOP,
    Phase.RESTING: Duty.STOP,
    Phase.ON_TRIAL: Duty.STAND_BY,
}


class Lifecycle:
    """One child. Whoever builds the scheduler's own instance calls ``begin_trial`` and ``serve``."""

    def __init__(self, backoff: Backoff) -> None:
        self.backoff = backoff
        self.phase = Phase.SERVING
        self.generation = 0
        self.told = True
        """Whether the ranks have been sent the present order."""

    @property
    def order(self) -> Order:
        return Order(self.generation, _DUTIES[self.phase])

    @property
    def needs_steps(self) -> bool:
        """Whether an idle engine should go on stepping for it: news for the ranks, or an answer that is about to come.

        Not while it rests or while a rank cannot stop it: either may last, and an idle engine would spin.
        """
        return not self.told or self.phase is Phase.ON_TRIAL

    def isolate(self, now: float) -> None:
        if self.phase in (Phase.SERVING, Phase.ON_TRIAL):
            self.backoff.failed(now)
            self._enter(Phase.STOPPING)

    def stopped(self) -> None:
        """All ranks have stopped their instances."""
        if self.phase is Phase.STOPPING:
            self.phase = Phase.RESTING

    def may_try(self, now: float) -> bool:
        return self.phase is Phase.RESTING and self.backoff.may_try(now)

    def trial_failed(self, now: float) -> None:
        """The scheduler could not build its own instance: the ranks need not hear of this attempt."""
        self.backoff.failed(now)

    def begin_trial(self) -> None:
        self.generation += 1
        self._enter(Phase.ON_TRIAL)

    def serve(self, now: float) -> None:
        self.backoff.succeeded(now)
        self._enter(Phase.SERVING)

    def _enter(self, phase: Phase) -> None:
        self.phase, self.told = phase, False
