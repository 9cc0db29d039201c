# SPDX-License-Identifier: Apache-2.0
"""Replays a trace through one tier, as the connector's scheduler drives it: what each request restores, and why not
more."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.replay_tiers import IndexShelf
from bench.trace import TraceRequest
from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.geometry import Geometry, Group
from vllm_overlay.planner.objects import ObjectKind, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner


@dataclass(frozen=True, slots=True)
class Served:
    """One request, in tokens: what the tier restored, and why not the rest."""

    num_tokens: int
    num_restored: int
    lost: dict[Reason, int]


@dataclass(slots=True)
class Clock:
    """The trace's time, in seconds. A policy reads it as it would read ``time.monotonic``."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class _RememberingPlanner(HybridOffloadPlanner):
    """Makes each chunk once: a trace names the same ones again and again."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self._made: dict[tuple[int, bytes], PlannedObject] = {}

    def chunk(self, keys: Sequence[bytes], group: Group, index: int) -> PlannedObject:
        name = group.group_id, keys[index]
        if (made := self._made.get(name)) is None:
            made = self._made[name] = super().chunk(keys, group, index)
        return made


class HitReplay:
    """Serves requests one after the other: lookup, load or mark, then prefill steps with their stores.

    ``step_tokens``: of one prefill step. ``speculative_tokens``: where a step ends so far after the last snapshot,
    another one is stored; 0: never. ``last_block``: a prompt leaves a snapshot at the end of its last whole block too,
    as in vLLM.
    """

    def __init__(
        self,
        geometry: Geometry,
        shelf: IndexShelf,
        clock: Clock,
        step_tokens: int,
        speculative_tokens: int = 0,
        last_block: bool = False,
    ) -> None:
        self._geometry = geometry
        self._planner = _RememberingPlanner(geometry)
        self._shelf = shelf
        self._clock = clock
        self._step_tokens = step_tokens
        self._speculative_tokens = speculative_tokens
        self._block_tokens = max(group.block_size for group in geometry.groups) if last_block else 0

    def serve(self, request: TraceRequest) -> Served:
        self._clock.now = request.arrival_s
        keys = [block_id.to_bytes(8, "little") for block_id in request.block_ids]
        lookup = self._planner.lookup(keys, request.num_tokens, 0, self._shelf.index)
        planned = self._planner.load_plan(keys, 0, lookup.restore_point)
        self._shelf.use([item.object_id for item in planned])
        last = self._geometry.floor_to_restore_point(request.num_tokens - 1)
        stops = {lookup.junction, last}
        if self._block_tokens:
            stops.add(last // self._block_tokens * self._block_tokens)
        self._prefill(keys, lookup.restore_point, request.num_tokens, stops)
        return Served(request.num_tokens, lookup.restore_point, lookup.lost)

    def _prefill(self, keys: Sequence[bytes], start: int, num_tokens: int, stops: set[int]) -> None:
        """Steps from ``start`` on. Stores follow each step, as the connector's do: chunks, then the step's state."""
        ahead = sorted(stop for stop in stops if start < stop <= num_tokens)
        chunks = sorted(self._planner.store_plan(keys, {}, num_tokens), key=lambda chunk: chunk.end_tokens)
        cursor = 0
        last_state = position = start
        while position < num_tokens:
            end = min(position + self._step_tokens, num_tokens)
            if end < num_tokens:
                end = self._geometry.floor_to_restore_point(end)
            if ahead and ahead[0] <= end:
                end = ahead.pop(0)
                is_kept = True
            else:
                is_kept = bool(self._speculative_tokens) and end - last_state >= self._speculative_tokens
            position = end
            while cursor < len(chunks) and chunks[cursor].end_tokens <= position:
                chunk = chunks[cursor]
                if not self._shelf.put(chunk) and chunk.object_id.kind is ObjectKind.FULL_ATTENTION:
                    break
                cursor += 1
            if is_kept and self._geometry.recurrent and self._geometry.is_restore_point(position):
                last_state = position
                self._shelf.put(self._planner.snapshot(keys, position))
