# SPDX-License-Identifier: Apache-2.0
"""Takes children out of service in all processes and brings them back as new instances. In the scheduler's process."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.logger import init_logger

from vllm_overlay.common.backoff import Backoff
from vllm_overlay.multi_connector.child import Child
from vllm_overlay.multi_connector.lifecycle import Duty, Lifecycle, Order, Phase
from vllm_overlay.multi_connector.metadata import MultiWorkerMetadata
from vllm_overlay.multi_connector.outstanding import OutstandingReports

logger = init_logger(f"vllm.{__name__}")


class Supervisor:
    """The lifecycles of all children. Called from the scheduler's thread; ``now``: seconds of one monotonic clock."""

    def __init__(self, children: Sequence[Child], retry_first_s: float, retry_longest_s: float) -> None:
        """``retry_first_s``, ``retry_longest_s``: the pauses before a child is tried again."""
        self._children = children
        self.lifecycles = [Lifecycle(Backoff(retry_first_s, retry_longest_s)) for _ in children]
        self._start_hooks: list[tuple[str, Any]] = []
        self._sent_gauges: list[dict[str, float]] = [{"state": 0.0, "quarantined_requests": 0.0} for _ in children]

    def start(self, hook: str, argument: Any) -> None:
        """Calls a hook of every child before serving, and remembers it for the instances to come."""
        self._start_hooks.append((hook, argument))
        for child in self._children:
            child.start(hook, argument)

    def notice_isolations(self, now: float) -> None:
        """A child is isolated in the process where it fails. From here the other processes hear of it.

        It is counted here, once, and not where it happens: a failed attempt to come back is no new isolation.
        """
        for child, lifecycle in zip(self._children, self.lifecycles, strict=True):
            if child.isolated and lifecycle.isolate(now):
                child.tally.count("isolations")

    def phase(self, child: int) -> Phase:
        return self.lifecycles[child].phase

    @property
    def needs_steps(self) -> bool:
        """Whether an idle engine should go on stepping."""
        return any(lifecycle.needs_steps for lifecycle in self.lifecycles)

    def send_orders(self) -> tuple[Order, ...]:
        """The orders that go out with this step's metadata."""
        for lifecycle in self.lifecycles:
            lifecycle.sent = True
        return tuple(lifecycle.order for lifecycle in self.lifecycles)

    def receive(self, reports: MultiWorkerMetadata, now: float) -> list[Child]:
        """What the ranks say to the orders they have seen. Returns the children that are back in service."""
        self.notice_isolations(now)
        returned = []
        for child, lifecycle, order in zip(self._children, self.lifecycles, reports.orders, strict=False):
            if order != lifecycle.order:
                continue  # an answer to an older order is none to the present one
            if child.index in reports.broken:
                child.isolate("a worker process took it out of service")
            elif order.duty is Duty.STOP and child.index not in reports.unstopped:
                lifecycle.stopped()
            elif order.duty is Duty.STAND_BY and self._admit(child, reports.handshakes.get(child.index, {})):
                lifecycle.serve(now)
                child.tally.count("returns")
                logger.info("Connector %r is back in service, as instance %d.", child.name, lifecycle.generation)
                returned.append(child)
        self.notice_isolations(now)
        return returned

    def _admit(self, child: Child, handshakes: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> bool:
        """All processes have a new instance, which begins empty: it may have missed a reset. False when it fails."""
        child.standing_by = False
        child.call("set_xfer_handshake_metadata_pp_aware", None, dict(handshakes))
        child.call("reset_cache", None)
        return not child.isolated

    def try_again(self, held_for: Collection[int], now: float) -> None:
        """Builds a new instance of each child when its pause is over: the child is half open.

        ``held_for``: children for which this step tells the workers that blocks are held. They are left for a later
        step, because the workers would expect those blocks of the new instance.
        """
        for child, lifecycle in zip(self._children, self.lifecycles, strict=True):
            if not lifecycle.may_try(now) or child.index in held_for:
                continue
            child.stop()
            if child.renew(lifecycle.generation + 1, *self._start_hooks):
                lifecycle.half_open()
            else:
                lifecycle.attempt_failed(now)

    def record_gauges(self, outstanding: OutstandingReports) -> None:
        """Puts what has changed since the last report into the children's tallies, and who is out of service."""
        for child, lifecycle, sent in zip(self._children, self.lifecycles, self._sent_gauges, strict=True):
            if lifecycle.phase is Phase.SERVING and not any(sent.values()):
                continue  # nothing has changed
            held = 0 if lifecycle.phase is Phase.SERVING else outstanding.owed_by(child.index)
            gauges = {"state": float(lifecycle.phase.value), "quarantined_requests": float(held)}
            changed = {name: value for name, value in gauges.items() if sent[name] != value}
            sent.update(changed)
            if lifecycle.phase is not Phase.SERVING:
                # In every report: vLLM's log line shows what came since the line before.
                changed["state"] = gauges["state"]
            for name, value in changed.items():
                child.tally.gauge(name, value)
