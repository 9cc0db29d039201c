# SPDX-License-Identifier: Apache-2.0
"""The lives of the children as the scheduler directs them: a circuit breaker each, with the workers in its loop.

    SERVING --isolate--> STOPPING --all ranks have stopped it--> OPEN --the pause is over--> HALF_OPEN --> SERVING
                            ^                                                                    |
                            +------------------- it failed again, here or on a rank -------------+

A child that comes back is a new instance, on the scheduler and on every rank. Its *generation* goes up by one when it
becomes half open. The scheduler sends an ``Order`` for each child with each step's metadata. A rank's answer names the
orders it has seen, so an answer to an older order is not taken for one to the present order.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from vllm_overlay.common.backoff import Backoff
from vllm_overlay.multi_connector.child import Child
from vllm_overlay.multi_connector.hooks import logger
from vllm_overlay.multi_connector.metadata import Duty, MultiWorkerMetadata, Order
from vllm_overlay.multi_connector.outstanding import OutstandingReports

Clock = Callable[[], float]
"""In seconds; monotonic."""


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


_DUTIES = {Phase.SERVING: Duty.SERVE, Phase.STOPPING: Duty.STOP, Phase.OPEN: Duty.STOP, Phase.HALF_OPEN: Duty.STAND_BY}


@dataclass(slots=True)
class Lifecycle:
    """One child's, as ``Supervisor`` has it."""

    backoff: Backoff
    phase: Phase = Phase.SERVING
    generation: int = 0
    sent: bool = True
    """Whether the ranks have been sent the present order."""

    @property
    def order(self) -> Order:
        return Order(self.generation, _DUTIES[self.phase])

    def enter(self, phase: Phase) -> None:
        """A phase with another order."""
        self.phase, self.sent = phase, False


class Supervisor:
    """Takes children out of service in all processes and brings them back. In the scheduler's process and thread.

    ``clock`` is asked when something has ended: an attempt may take longer than the pause after it.
    """

    def __init__(self, children: Sequence[Child], retry_first_s: float, retry_longest_s: float) -> None:
        """``retry_first_s``, ``retry_longest_s``: the pauses before a child is tried again."""
        self._children = children
        self.lifecycles = [Lifecycle(Backoff(retry_first_s, retry_longest_s)) for _ in children]
        self._sent_gauges: list[dict[str, float]] = [{} for _ in children]

    def is_at_rest(self) -> bool:
        """Whether all children serve and every rank has been told so. Each step asks."""
        for child, lifecycle in zip(self._children, self.lifecycles, strict=True):
            if child.isolated or lifecycle.phase is not Phase.SERVING or not lifecycle.sent:
                return False
        return True

    def notice_isolations(self, clock: Clock) -> None:
        """A child is isolated in the process where it fails. From here the other processes hear of it.

        It is counted here, once, and not where it happens: a failed attempt to come back is no new isolation.
        """
        for child, lifecycle in zip(self._children, self.lifecycles, strict=True):
            if child.isolated and lifecycle.phase in (Phase.SERVING, Phase.HALF_OPEN):
                child.tally.count("isolations", lifecycle.phase is Phase.SERVING)
                lifecycle.backoff.failed(clock())
                lifecycle.enter(Phase.STOPPING)

    @property
    def needs_steps(self) -> bool:
        """Whether an idle engine should go on stepping: to send an order, or to hear an answer that will come.

        Not while a child is open or while a rank cannot stop it: either may last, and an idle engine would spin.
        """
        return any(not lifecycle.sent or lifecycle.phase is Phase.HALF_OPEN for lifecycle in self.lifecycles)

    def send_orders(self) -> tuple[Order, ...]:
        """The orders that go out with this step's metadata."""
        for lifecycle in self.lifecycles:
            lifecycle.sent = True
        return tuple([lifecycle.order for lifecycle in self.lifecycles])

    def receive(self, reports: MultiWorkerMetadata, clock: Clock) -> list[Child]:
        """What the ranks say to the orders they have seen. Returns the children that are back in service."""
        self.notice_isolations(clock)
        returned = []
        for child, lifecycle, order in zip(self._children, self.lifecycles, reports.orders, strict=False):
            if order != lifecycle.order:
                continue  # an answer to an older order is none to the present one
            if child.index in reports.broken:
                child.isolate("a worker process took it out of service")
            elif order.duty is Duty.STOP and child.index not in reports.unstopped:
                lifecycle.phase = Phase.OPEN
            elif order.duty is Duty.STAND_BY and self._admit(child, reports.handshakes.get(child.index, {})):
                lifecycle.backoff.succeeded(clock())
                lifecycle.enter(Phase.SERVING)
                child.tally.count("returns")
                logger.info("Connector %r is back in service, as instance %d.", child.name, lifecycle.generation)
                returned.append(child)
        self.notice_isolations(clock)
        return returned

    def _admit(self, child: Child, handshakes: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> bool:
        """All processes have a new instance, which begins empty: it may have missed a reset. False when it fails."""
        child.standing_by = False
        child.call("set_xfer_handshake_metadata_pp_aware", None, dict(handshakes))
        child.call("reset_cache", None)
        return not child.isolated

    def try_again(self, held_for: Collection[int], clock: Clock) -> None:
        """Builds a new instance of each child when its pause is over: the child is half open.

        ``held_for``: children for which this step tells the workers that blocks are held. They are left for a later
        step, because the workers would expect those blocks of the new instance.
        """
        for child, lifecycle in zip(self._children, self.lifecycles, strict=True):
            if lifecycle.phase is not Phase.OPEN or not lifecycle.backoff.may_try(clock()) or child.index in held_for:
                continue
            child.stop()
            if child.renew(lifecycle.generation + 1):
                lifecycle.generation += 1
                lifecycle.enter(Phase.HALF_OPEN)
            else:
                lifecycle.backoff.failed(clock())  # the ranks need not hear of this attempt

    def record_gauges(self, outstanding: OutstandingReports) -> None:
        """Puts what has changed since the last report into the children's tallies, and who is out of service."""
        for child, lifecycle, sent in zip(self._children, self.lifecycles, self._sent_gauges, strict=True):
            is_out = lifecycle.phase is not Phase.SERVING
            held = outstanding.owed_by(child.index) if is_out else 0
            for name, value in {"state": float(lifecycle.phase.value), "quarantined_requests": float(held)}.items():
                # The state of one that is out goes into every report: vLLM's log line has what came since the last.
                if sent.get(name) != value or (is_out and name == "state"):
                    sent[name] = value
                    child.tally.gauge(name, value)
