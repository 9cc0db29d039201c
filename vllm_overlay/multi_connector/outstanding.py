# SPDX-License-Identifier: Apache-2.0
"""The scheduler's account of what the workers still have to report: loads handed out, and blocks that children hold.

It knows what was handed out, so it stops a report that vLLM would assert on. An aborted request may have a load and
saves that are both open. vLLM's scheduler waits for the report of each (patch 0003), so each passes.
"""

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_overlay.multi_connector.metadata import Load

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


@dataclass(slots=True, frozen=True)
class OpenLoad:
    """An asynchronous load that was handed out, ``started`` then."""

    child: int
    blocks: tuple[int, ...]
    tokens: int
    started: float


class OutstandingReports:
    """Loads handed out, and finished requests that some children hold blocks of. Children are named by their index."""

    def __init__(self) -> None:
        self.loads: dict[str, OpenLoad] = {}
        """Asynchronous ones, by request."""
        self._synchronous: dict[str, Load] = {}
        self._held: dict[str, frozenset[int]] = {}

    def load_started(self, request_id: str, load: Load, tokens: int, now: float) -> None:
        """It was handed out. A synchronous one is known until it fails or the request gives its blocks back."""
        if load.is_synchronous:
            self._synchronous[request_id] = load
        else:
            self.loads[request_id] = OpenLoad(load.child, load.blocks, tokens, now)

    def synchronous_loads_failed(self, bad_blocks: Set[int]) -> list[tuple[str, int]]:
        """(request, child) of the loads that were to write one of these blocks, each once."""
        loads = self._synchronous.items()
        failed = [(request_id, load.child) for request_id, load in loads if not bad_blocks.isdisjoint(load.blocks)]
        for request_id, _ in failed:
            del self._synchronous[request_id]
        return failed

    def blocks_are_given_back(self, request_id: str) -> None:
        """The request is finished, or was preempted: another's load may write these blocks now."""
        self._synchronous.pop(request_id, None)

    def hold(self, request_id: str, children: Collection[int]) -> None:
        self._held[request_id] = frozenset(children)

    def owed_by(self, child: int) -> int:
        """How many requests have blocks that ``child`` may still touch."""
        loads = {request_id for request_id, load in self.loads.items() if load.child == child}
        return len(loads | {request_id for request_id, children in self._held.items() if child in children})

    def overdue(self, started_before: float) -> set[int]:
        """Children with a load that was handed out before then."""
        return {load.child for load in self.loads.values() if load.started < started_before}

    def loads_under_way(self, now: float) -> list[tuple[int, int, float]]:
        """(child, tokens, seconds so far) of each asynchronous load."""
        return [(load.child, load.tokens, now - load.started) for load in self.loads.values()]

    def loads_ended(self, received: Iterable[str]) -> dict[str, OpenLoad]:
        """Takes in the requests whose load the workers have reported, and returns the loads that were handed out."""
        return {request_id: self.loads.pop(request_id) for request_id in received if request_id in self.loads}

    def saves_ended(self, sent: Iterable[str]) -> set[str]:
        """Takes in the requests whose blocks all holders are done with, and returns those that were held."""
        return {request_id for request_id in sent if self._held.pop(request_id, None) is not None}

    def view(self, child: int, output: "KVConnectorOutput", **parts: Any) -> "KVConnectorOutput":
        """One child's copy of a step's reports: all loads, and of the sent requests those that it holds.

        ``parts``: other fields that it gets instead of ``output``'s.
        """
        own = (request_id for request_id in output.finished_sending or () if child in self._held.get(request_id, ()))
        # Every step makes one for each child, and copy.copy or dataclasses.replace would be most of its time.
        view = object.__new__(type(output))
        view.__dict__.update(
            {
                **vars(output),
                "finished_sending": frozenset(own) or None,
                "finished_recving": frozenset(output.finished_recving or ()) or None,
                "failed_recving": frozenset(output.failed_recving),
                **parts,
            }
        )
        return view
