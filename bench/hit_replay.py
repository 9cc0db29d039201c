# SPDX-License-Identifier: Apache-2.0
"""Replays a trace through one tier, as the connector's scheduler drives it: what each request restores, and why not
more."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.replay_tiers import IndexShelf
from bench.trace import TraceRequest
from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.geometry import Geometry, Group
from vllm_overlay.planner.objects import ObjectKind, PlannedObject
from vllm_overlay.planner.planner import HybridOffloadPlanner

ExtraStops = Callable[[int, Sequence[bytes]], Iterable[int]]
"""From a request's place and its keys: boundaries at which a prefill stops too."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request, in tokens: what the device cache had, what the tier added, and why it did not add the rest."""

    num_tokens: int
    num_local: int
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
    another one is stored; 0: never. ``device``: a cache in front of the tier, with the same objects. ``last_block``:
    a prompt leaves a snapshot at the end of its last whole block too, as in vLLM.
    """

    def __init__(
        self,
        geometry: Geometry,
        shelf: IndexShelf,
        clock: Clock,
        step_tokens: int,
        speculative_tokens: int = 0,
        device: IndexShelf | None = None,
        extra_stops: ExtraStops | None = None,
        last_block: bool = False,
    ) -> None:
        self._geometry = geometry
        self._planner = _RememberingPlanner(geometry)
        self._shelf = shelf
        self._clock = clock
        self._step_tokens = step_tokens
        self._speculative_tokens = speculative_tokens
        self._shelves = [shelf] if device is None else [device, shelf]
        self._device = device
        self._extra_stops = extra_stops
        self._block_tokens = max(group.block_size for group in geometry.groups) if last_block else 0

    def serve(self, place: int, request: TraceRequest) -> Served:
        """``place``: of the request in its trace."""
        self._clock.now = request.arrival_s
        keys = [block_id.to_bytes(8, "little") for block_id in request.block_ids]
        num_local = self._use_device(keys, request.num_tokens)
        lookup = self._planner.lookup(keys, request.num_tokens, num_local, self._shelf.index)
        if lookup.num_new_tokens:
            planned = self._planner.load_plan(keys, num_local, lookup.restore_point)
            self._shelf.use([item.object_id for item in planned])
        else:
            boundaries = {num_local, lookup.restore_point}
            used = [one for boundary in boundaries for one in self._planner.last_needed(keys, boundary)]
            self._shelf.index.touch(used)
        start = max(num_local, lookup.restore_point)
        last = self._geometry.floor_to_restore_point(request.num_tokens - 1)
        stops = {lookup.junction, last}
        if self._block_tokens:
            stops.add(last // self._block_tokens * self._block_tokens)
        if self._extra_stops is not None:
            stops.update(self._extra_stops(place, keys))
        self._prefill(keys, start, request.num_tokens, stops)
        return Served(request.num_tokens, num_local, lookup.num_new_tokens, lookup.lost)

    def _use_device(self, keys: Sequence[bytes], num_tokens: int) -> int:
        if self._device is None:
            return 0
        found = self._planner.lookup(keys, num_tokens, 0, self._device.index).restore_point
        self._device.use([item.object_id for item in self._planner.load_plan(keys, 0, found)])
        return found

    def _prefill(self, keys: Sequence[bytes], start: int, num_tokens: int, stops: set[int]) -> None:
        """Steps from ``start`` on. Stores follow each step, as the connector's do: chunks, then the step's state."""
        ahead = sorted(stop for stop in stops if start < stop <= num_tokens)
        chunks = sorted(self._planner.store_plan(keys, {}, num_tokens), key=lambda chunk: chunk.end_tokens)
        cursors = [0] * len(self._shelves)
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
            for number, shelf in enumerate(self._shelves):
                cursor = cursors[number]
                while cursor < len(chunks) and chunks[cursor].end_tokens <= position:
                    if not shelf.put(chunks[cursor]) and chunks[cursor].object_id.kind is ObjectKind.FULL_ATTENTION:
                        break
                    cursor += 1
                cursors[number] = cursor
            if is_kept and self._geometry.recurrent and self._geometry.is_restore_point(position):
                last_state = position
                for shelf in self._shelves:
                    shelf.put(self._planner.snapshot(keys, position))
