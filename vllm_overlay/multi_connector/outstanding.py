# SPDX-License-Identifier: Apache-2.0
"""The scheduler's account of what the workers still have to report: loads handed out, and blocks that children hold.

A child's scheduler-side instance may change the reports (report_view.py), under these rules:

- It changes only what is its own: the loads that it was handed, and the blocks that it holds.
- What it takes out stays owed until it puts it in again.
- It may give up blocks that it holds before the workers report them. It may not end a load that the workers have not
  reported, because they may still write. It cannot make a load fail: vLLM reads the failures before the hook.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from vllm_overlay.multi_connector.report_view import Changes, Reports


@dataclass(slots=True)
class _OpenLoad:
    child: int
    tokens: int
    started: float
    taken_out: bool = False
    """Whether the workers have reported it and its child does not want it known yet."""
    failed: bool = False


@dataclass(slots=True, frozen=True)
class EndedLoad:
    """A load the workers have reported: its child, its tokens, how long it took, and whether it failed."""

    request_id: str
    child: int
    tokens: int
    seconds: float
    failed: bool


@dataclass(slots=True)
class Accepted:
    """What of a step's reports vLLM may see, and what else follows from them."""

    may_receive: set[str] = field(default_factory=set)
    may_send: set[str] = field(default_factory=set)
    ended: list[EndedLoad] = field(default_factory=list)
    releases: dict[str, set[int]] = field(default_factory=dict)
    """Request -> children that gave up its blocks without a report of the workers."""
    ignored: dict[int, int] = field(default_factory=dict)
    """Child -> how many changes were not its to make."""


class OutstandingReports:
    """Asynchronous loads handed out, and finished requests that some children hold blocks of.

    It knows what was handed out, so it stops a report that vLLM would assert on.
    """

    def __init__(self) -> None:
        self._loads: dict[str, _OpenLoad] = {}
        self._synchronous: dict[str, tuple[int, frozenset[int]]] = {}
        self._held: dict[str, set[int]] = {}
        self._taken_out: dict[int, set[str]] = {}
        """Child -> requests whose blocks it keeps though the workers have reported them."""

    @property
    def open_requests(self) -> int:
        return len(self._loads.keys() | self._held.keys() | self._synchronous.keys())

    def load_started(self, request_id: str, child: int, tokens: int, now: float) -> None:
        self._loads[request_id] = _OpenLoad(child, tokens, now)

    def synchronous_load_started(self, request_id: str, child: int, blocks: Collection[int]) -> None:
        """``blocks``: those that this load alone writes. Known until it fails or the request gives them back."""
        self._synchronous[request_id] = child, frozenset(blocks)

    def synchronous_loads_failed(self, bad_blocks: Collection[int]) -> list[tuple[str, int]]:
        """(request, child) of the loads that were to write one of these blocks, each once."""
        failed = [
            (request_id, child)
            for request_id, (child, blocks) in self._synchronous.items()
            if not blocks.isdisjoint(bad_blocks)
        ]
        for request_id, _ in failed:
            del self._synchronous[request_id]
        return failed

    def blocks_are_given_back(self, request_id: str) -> None:
        """The request is finished, or was preempted: another's load may write these blocks now."""
        self._synchronous.pop(request_id, None)

    def hold(self, request_id: str, children: Collection[int]) -> None:
        self._held[request_id] = set(children)

    def owed_by(self, child: int) -> int:
        """How many requests have blocks that ``child`` may still touch."""
        loads = {request_id for request_id, load in self._loads.items() if load.child == child}
        return len(loads | {request_id for request_id, children in self._held.items() if child in children})

    def overdue(self, started_before: float) -> set[int]:
        """Children with a load that was handed out before then."""
        return {load.child for load in self._loads.values() if load.started < started_before}

    def loads_under_way(self, now: float) -> list[tuple[int, int, float]]:
        """(child, tokens, seconds so far) of each load that the workers have not reported."""
        return [(load.child, load.tokens, now - load.started) for load in self._loads.values() if not load.taken_out]

    def loader_of(self, request_id: str) -> int | None:
        load = self._loads.get(request_id)
        return None if load is None else load.child

    def holders_of(self, request_id: str) -> frozenset[int]:
        return frozenset(self._held.get(request_id, ()))

    def all_put_in(self, child: int) -> Changes:
        """For a child out of service: it puts in whatever it had taken out, which the workers are done with."""
        loads = frozenset(r for r, load in self._loads.items() if load.child == child and load.taken_out)
        return Changes(sent_added=frozenset(self._taken_out.get(child, ())), received_added=loads)

    def accept(self, reports: Reports, changes: Mapping[int, Changes], now: float) -> Accepted:
        """Takes in a step's reports, with what each child changed in them.

        An aborted request may have a load and saves that are both open. The scheduler waits for the report of each
        (patch 0003), so each passes.
        """
        accepted = Accepted()
        self._accept_loads(reports, changes, now, accepted)
        self._accept_saves(reports, changes, accepted)
        return accepted

    def _accept_loads(self, reports: Reports, changes: Mapping[int, Changes], now: float, accepted: Accepted) -> None:
        for request_id in reports.received:
            if (load := self._loads.get(request_id)) is None:
                continue
            own = changes.get(load.child, Changes())
            load.failed = request_id in reports.failed
            load.taken_out = request_id in own.received_removed
            if not load.taken_out:
                self._end_load(request_id, now, accepted)
        for child, own in changes.items():
            for request_id in own.received_added:
                known = self._loads.get(request_id)
                if known is None or known.child != child or not known.taken_out:
                    accepted.ignored[child] = accepted.ignored.get(child, 0) + 1
                    continue
                self._end_load(request_id, now, accepted)

    def _end_load(self, request_id: str, now: float, accepted: Accepted) -> None:
        load = self._loads.pop(request_id)
        accepted.ended.append(EndedLoad(request_id, load.child, load.tokens, now - load.started, load.failed))
        accepted.may_receive.add(request_id)

    def _accept_saves(self, reports: Reports, changes: Mapping[int, Changes], accepted: Accepted) -> None:
        for request_id in reports.sent:
            for child in self.holders_of(request_id):
                if request_id in changes.get(child, Changes()).sent_removed:
                    self._taken_out.setdefault(child, set()).add(request_id)
                else:
                    self._let_go(request_id, child, accepted)
        for child, own in changes.items():
            for request_id in own.sent_added:
                if child not in self.holders_of(request_id):
                    accepted.ignored[child] = accepted.ignored.get(child, 0) + 1
                    continue
                if request_id not in self._taken_out.get(child, ()):
                    accepted.releases.setdefault(request_id, set()).add(child)
                self._let_go(request_id, child, accepted)

    def _let_go(self, request_id: str, child: int, accepted: Accepted) -> None:
        """``child`` holds the request's blocks no longer."""
        if (taken_out := self._taken_out.get(child)) is not None:
            taken_out.discard(request_id)
            if not taken_out:
                del self._taken_out[child]
        holders = self._held[request_id]
        holders.discard(child)
        if not holders:
            del self._held[request_id]
            accepted.may_send.add(request_id)


def children_of(requests: Mapping[str, Collection[int]]) -> dict[str, tuple[int, ...]]:
    """Requests with their children as they cross to the workers: hashable, ordered."""
    return {request_id: tuple(sorted(children)) for request_id, children in requests.items()}
