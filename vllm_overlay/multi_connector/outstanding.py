# SPDX-License-Identifier: Apache-2.0
"""The scheduler's account of what the workers still have to report: loads handed out, and blocks that children hold."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class _OpenLoad:
    child: int
    tokens: int
    started: float


@dataclass(slots=True, frozen=True)
class EndedLoad:
    """A load the workers have reported: its child, its tokens, how long it took, and whether it failed."""

    request_id: str
    child: int
    tokens: int
    seconds: float
    failed: bool


class OutstandingReports:
    """Asynchronous loads handed out, and finished requests that some children hold blocks of.

    It knows what was handed out, so it stops a report that vLLM would assert on.
    """

    def __init__(self) -> None:
        self._loads: dict[str, _OpenLoad] = {}
        self._held: dict[str, frozenset[int]] = {}

    @property
    def open_requests(self) -> int:
        return len(self._loads.keys() | self._held.keys())

    def load_started(self, request_id: str, child: int, tokens: int, now: float) -> None:
        self._loads[request_id] = _OpenLoad(child, tokens, now)

    def hold(self, request_id: str, children: frozenset[int]) -> None:
        self._held[request_id] = children

    def owed_by(self, child: int) -> int:
        """How many requests have blocks that ``child`` may still touch."""
        loads = {request_id for request_id, load in self._loads.items() if load.child == child}
        return len(loads | {request_id for request_id, children in self._held.items() if child in children})

    def overdue(self, started_before: float) -> set[int]:
        """Children with a load that was handed out before then."""
        return {load.child for load in self._loads.values() if load.started < started_before}

    def loader_of(self, request_id: str) -> int | None:
        load = self._loads.get(request_id)
        return None if load is None else load.child

    def holders_of(self, request_id: str) -> frozenset[int]:
        return self._held.get(request_id, frozenset())

    def accept(
        self, received: Collection[str], sent: Collection[str], failed: Collection[str], now: float
    ) -> tuple[set[str], set[str], list[EndedLoad]]:
        """What of the workers' reports vLLM may see, and the loads that ended.

        vLLM frees a finished request's blocks on the first report of either kind and asserts on a second. So while a
        load of an aborted request and saves of it are both open, only the later report passes.
        """
        may_receive: set[str] = set()
        may_send: set[str] = set()
        ended: list[EndedLoad] = []
        for request_id in received:
            if (load := self._loads.pop(request_id, None)) is None:
                continue
            ended.append(EndedLoad(request_id, load.child, load.tokens, now - load.started, request_id in failed))
            if request_id not in self._held:
                may_receive.add(request_id)
        for request_id in sent:
            if self._held.pop(request_id, None) is not None and request_id not in self._loads:
                may_send.add(request_id)
        return may_receive, may_send, ended


def saves_of(promises: Mapping[str, Collection[int]]) -> dict[str, tuple[int, ...]]:
    """Promises as they cross to the workers: hashable, ordered."""
    return {request_id: tuple(sorted(children)) for request_id, children in promises.items()}
