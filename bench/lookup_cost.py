# SPDX-License-Identifier: Apache-2.0
"""What the MultiConnector adds to a lookup: ``python -m bench.lookup_cost``.

The children answer at once, and there is no engine.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from bench.measure import table
from vllm_overlay.multi_connector.child import Child
from vllm_overlay.multi_connector.choice import decide
from vllm_overlay.multi_connector.hooks import Watchdog
from vllm_overlay.multi_connector.scheduler import SchedulerSide
from vllm_overlay.multi_connector.settings import ChildSettings, MultiSettings
from vllm_overlay.multi_connector.weights import LoadWeight

ROUNDS, CALLS = 7, 2000


class Instant:
    """A child that has the same tokens for everyone."""

    def __init__(self, tokens: int) -> None:
        self._answer = tokens, True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._answer

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Looked at when the child is built."""


def microseconds(action: Callable[[], object]) -> float:
    """The median of some rounds of many calls, of one call."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            action()
        rounds.append((time.perf_counter() - started) / CALLS * 1e6)
    return statistics.median(rounds)


def scheduler_side(num_children: int, weight: LoadWeight, watchdog: Watchdog) -> SchedulerSide:
    """Children with 100, 200, ... tokens, whose loads were measured."""
    children = [Child(i, str(i), Instant(100 * (i + 1)), lambda: None, watchdog) for i in range(num_children)]
    settings = {child.name: ChildSettings() for child in children}
    side = SchedulerSide(children, MultiSettings(connectors=[{}]), settings, True, [weight] * num_children)
    for tokens in range(1000, 9000, 1000):
        side.choice.step_ended(tokens, 0.001 * tokens)
        for child in children:
            side.choice.load_ended(child.index, tokens, 0.01 + 0.0001 * tokens, failed=False)
    return side


def ask(children: list[Instant], request: Any) -> None:
    for child in children:
        child.get_num_new_matched_tokens(request, 0)


def main() -> None:
    """Prints the table of docs/benchmarks.md."""
    watchdog = Watchdog(30.0)
    request: Any = SimpleNamespace(request_id="r", num_tokens=10_000, shared_prefix_boundary=0, kv_transfer_params=None)
    rows = []
    for num_children in (1, 2, 8):
        offers = [100 * (i + 1) for i in range(num_children)]
        bare = [Instant(100) for _ in range(num_children)]
        sides = [scheduler_side(num_children, weight, watchdog) for weight in (LoadWeight(1.0), LoadWeight(0.8, True))]
        times = [
            microseconds(partial(ask, bare, request)),
            microseconds(partial(decide, offers, lambda _, tokens: float(tokens), 9_999)),
            *(microseconds(partial(side.get_num_new_matched_tokens, request, 0)) for side in sides),
        ]
        rows.append([num_children, *(f"{one:.1f}" for one in times)])
    watchdog.stop()
    columns = ["children", "asking them alone", "the decision alone", "a whole lookup, numbers", "auto"]
    print(table(columns, rows))


if __name__ == "__main__":
    main()
