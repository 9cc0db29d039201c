# SPDX-License-Identifier: Apache-2.0
"""What is least worth its bytes first: tokens that a restore point adds, by its bytes, by how soon it is used again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import msgspec

from vllm_overlay.planner.objects import ObjectKind
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.policies import runs
from vllm_overlay.tiers.policies.base import EvictionPolicy
from vllm_overlay.tiers.policies.reuse import Learned, ReuseModel, Role, levels_of
from vllm_overlay.tiers.policies.runs import Point, Run

SAMPLE = 64
NUM_GHOSTS = 8192


class Ghost(msgspec.Struct, gc=False):
    """A point that is gone, by its last chunk's name: so long as it is known its return is seen."""

    watch: int
    role: Role
    boundary: int
    turns: int
    hits: int
    since: float


class LearnedEviction(EvictionPolicy[Entry]):
    """Evicts by unit: a restore point and the chunks that only it needs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, seed: int = 0) -> None:
        self._clock = clock
        self._random = random.Random(seed)
        self.model = ReuseModel()
        self._offered: dict[Entry, None] = {}
        self._candidates: list[Point] = []
        self._dead: dict[Run, None] = {}
        self._ghosts: dict[bytes, Ghost] = {}
        self._passed: dict[Run, Ghost] = {}
        self._windows: dict[Entry, None] = {}

    # What happens to objects.

    def stored(self, item: Entry) -> None:
        kind = item.object_id.kind
        if kind is ObjectKind.SNAPSHOT:
            self._snapshot_stored(item)
        elif kind is ObjectKind.FULL_ATTENTION:
            self._chunk_stored(item)

    def _chunk_stored(self, chunk: Entry) -> None:
        above = runs.chunk_above(chunk)
        if above is None:
            run = runs.begin(chunk, None)
        else:
            parent = self._run_ending_at(above)
            if parent.children or parent.points and not self._is_open(parent):
                run = runs.begin(chunk, parent)
            else:
                run = parent
                self._withdraw_points(run)
                runs.append(chunk, run)
        if run.is_dead:
            self._revive(run)
        ghost = self._ghosts.get(chunk.object_id.key)
        if ghost is not None:
            self._passed[run] = ghost

    def _is_open(self, run: Run) -> bool:
        """Whether a run only has the point of a prompt that is being stored."""
        return all(point.entry is None and not point.hits for point in run.points)

    def _withdraw_points(self, run: Run) -> None:
        for point in run.points:
            self._withdraw(point)

    def _run_ending_at(self, chunk: Entry) -> Run:
        run = chunk.unit
        assert isinstance(run, Run)
        return run if run.tail is chunk else runs.split(run, chunk)

    def _snapshot_stored(self, entry: Entry) -> None:
        ending = [self._run_ending_at(chunk) for chunk in entry.parents]
        now = self._clock()
        point = self._pending_point(ending)
        if point is None:
            point = Point(entry.end_tokens, Role.END, now, dict.fromkeys(ending))
            for run in ending:
                run.points[point] = None
        else:
            self._withdraw(point)
            self.model.cancel(point.role, point.watch)
        point.entry = entry
        point.boundary = entry.end_tokens
        entry.unit = point
        for run in ending:
            self._revive(run)
        self._describe(point, ending, now)

    def _pending_point(self, ending: Sequence[Run]) -> Point | None:
        for run in ending:
            for point in run.points:
                if point.entry is None and not point.hits:
                    return point
        return None

    def _describe(self, point: Point, ending: Sequence[Run], now: float) -> None:
        """A new point: its role, and what is known of the conversation that it belongs to."""
        run = ending[0] if ending else None
        point.role = Role.END
        if run is not None and run.children:
            point.role = Role.JUNCTION
        above = self._point_above(run)
        if above is not None and point.role is Role.END:
            self._continue(above, point, now)
        point.num_new = point.boundary - (above.boundary if above is not None else 0)
        if above is not None and above.role is Role.SPECULATIVE:
            point.num_new += above.num_new
        if run is not None:
            self._meet_ghost(run, point, now)
        point.since = now
        self._watch(point, now)

    def _continue(self, above: Point, point: Point, now: float) -> None:
        """``point`` comes after ``above`` in one prompt."""
        if above.role is Role.END:
            if not above.hits:
                self.model.cancel(above.role, above.watch)
            above.role = Role.SUPERSEDED if above.hits else Role.SPECULATIVE
            self._watch(above, now)
        if above.role is Role.SUPERSEDED:
            point.turns = above.turns + 1
            point.gap_s = above.gap_s
        elif above.role is Role.SPECULATIVE:
            point.turns = above.turns
            point.gap_s = above.gap_s

    def _meet_ghost(self, run: Run, point: Point, now: float) -> None:
        """The deepest point that is gone and that this prompt would have used."""
        ghost = self._passed.pop(run, None)
        key = run.tail.object_id.key
        ghost = ghost or self._ghosts.get(key)
        if ghost is None:
            return
        self.model.end(ghost.role, ghost.watch, now)
        if ghost.boundary == point.boundary:
            point.hits, point.turns, point.gap_s = ghost.hits + 1, ghost.turns, now - ghost.since
            if ghost.role in (Role.JUNCTION, Role.SUPERSEDED):
                point.role = Role.JUNCTION
        elif ghost.role is not Role.JUNCTION:
            point.turns, point.gap_s = ghost.turns + 1, now - ghost.since
            point.num_new = min(point.num_new, max(0, point.boundary - ghost.boundary))

    def _point_above(self, run: Run | None, *roles: Role) -> Point | None:
        """The nearest one above a run, of any role but ``roles``."""
        run = run.parent if run is not None else None
        while run is not None:
            found = None
            for point in run.points:
                if point.role not in roles and (found is None or point.boundary > found.boundary):
                    found = point
            if found is not None:
                return found
            run = run.parent
        return None

    def _watch(self, point: Point, now: float) -> None:
        levels = levels_of(point.role, point.boundary, point.num_new, point.turns, point.hits, point.gap_s)
        point.watch = self.model.begin(point.role, levels, now)
        point.version = -1

    def used(self, items: Sequence[Entry]) -> None:
        point = self._used_point(items)
        if point is None:
            return
        now = self._clock()
        self.model.end(point.role, point.watch, now)
        point.gap_s = now - point.since
        point.hits += 1
        point.since = now
        if point.role in (Role.SUPERSEDED, Role.SPECULATIVE):
            point.role = Role.JUNCTION
        self._watch(point, now)

    def _used_point(self, items: Sequence[Entry]) -> Point | None:
        if not items:
            return None
        if items[-1].object_id.is_snapshot:
            last = items[-1]
        else:
            last = max(items, key=lambda item: (item.object_id.is_snapshot, item.end_tokens))
        if isinstance(last.unit, Point):
            return last.unit
        return None

    def removed(self, item: Entry) -> None:
        unit, item.unit = item.unit, None
        if isinstance(unit, Point):
            self._snapshot_removed(unit)
        elif isinstance(unit, Run):
            self._chunk_removed(item, unit)
        self._windows.pop(item, None)

    def _snapshot_removed(self, point: Point) -> None:
        self._withdraw(point)
        ending = list(point.runs)
        if ending and point.role is not Role.SPECULATIVE:
            self._remember(point, ending[0].tail.object_id.key)
        point.entry = None
        point.runs.clear()
        for run in ending:
            del run.points[point]
            self._settle(run)

    def _remember(self, point: Point, key: bytes) -> None:
        self._ghosts.pop(key, None)
        self._ghosts[key] = Ghost(
            point.watch, point.role, point.boundary, point.turns, point.hits, point.since
        )
        if len(self._ghosts) > NUM_GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]

    def _settle(self, run: Run) -> None:
        """A run that may have lost its purpose."""
        if run.points:
            return
        if not run.children:
            run.is_dead = True
            self._dead[run] = None
        elif len(run.children) == 1:
            runs.join(run)
            self._passed.pop(run, None)

    def _revive(self, run: Run | None) -> None:
        while run is not None and run.is_dead:
            run.is_dead = False
            del self._dead[run]
            run = run.parent

    def _chunk_removed(self, chunk: Entry, run: Run) -> None:
        run.num_bytes -= chunk.num_bytes
        above = runs.chunk_above(chunk)
        if above is not None and above.unit is run:
            run.tail = above
            return
        self._passed.pop(run, None)
        for point in list(run.points):
            self._withdraw(point)
            self._remember(point, chunk.object_id.key)
            point.runs.clear()
        run.points.clear()
        self._dead.pop(run, None)
        parent, run.parent = run.parent, None
        if parent is not None:
            del parent.children[run]
            self._settle(parent)

    # What may go.

    def add(self, item: Entry, last_use: int, end_tokens: int) -> None:
        self._offered[item] = None
        unit = item.unit
        if isinstance(unit, Point):
            self._offer(unit)
        elif isinstance(unit, Run):
            if not unit.is_dead:
                self._offer(self._end_of(unit))
        else:
            self._windows[item] = None

    def _end_of(self, run: Run) -> Point:
        """The point without a snapshot at the end of a run."""
        for point in run.points:
            if point.entry is None:
                point.boundary = run.tail.end_tokens
                return point
        now = self._clock()
        point = Point(run.tail.end_tokens, Role.END, now, {run: None})
        run.points[point] = None
        above = self._point_above(run)
        point.num_new = point.boundary - (above.boundary if above is not None else 0)
        self._watch(point, now)
        return point

    def _offer(self, point: Point) -> None:
        if point.place < 0:
            point.place = len(self._candidates)
            self._candidates.append(point)

    def _withdraw(self, point: Point) -> None:
        if point.place < 0:
            return
        last = self._candidates.pop()
        if last is not point:
            self._candidates[point.place] = last
            last.place = point.place
        point.place = -1

    def discard(self, item: Entry) -> None:
        if item not in self._offered:
            return
        del self._offered[item]
        self._windows.pop(item, None)
        unit = item.unit
        if isinstance(unit, Point):
            self._withdraw(unit)
        elif isinstance(unit, Run):
            for point in unit.points:
                if point.entry is None:
                    self._withdraw(point)

    def pop(self) -> Entry | None:
        item = self._next()
        if item is not None:
            self.discard(item)
        return item

    def _next(self) -> Entry | None:
        for run in self._dead:
            if run.tail in self._offered:
                return run.tail
        for window in self._windows:
            return window
        if not self._candidates:
            return None
        point = self._least(self._clock())
        if point.entry is not None:
            return point.entry
        return next(iter(point.runs)).tail

    def _least(self, now: float) -> Point:
        candidates = self._candidates
        count = len(candidates)
        if count > SAMPLE:
            draw = self._random.random
            candidates = [candidates[int(draw() * count)] for _ in range(SAMPLE)]
        return min(candidates, key=lambda point: self.value(point, now))

    def value(self, point: Point, now: float) -> float:
        """Tokens a byte and second."""
        num_bytes = 0 if point.entry is None else point.entry.num_bytes
        tokens = point.boundary
        for run in point.runs:
            if run.is_leaf and len(run.points) == 1:
                num_bytes += run.num_bytes
        first = next(iter(point.runs), None)
        if first is not None:
            if point.entry is None:
                tokens = point.boundary - first.start_tokens
            else:
                hidden = (Role.SPECULATIVE, Role.SUPERSEDED) if point.role in (Role.END, Role.JUNCTION) else ()
                above = self._point_above(first, *hidden)
                tokens = point.boundary - (above.boundary if above is not None else 0)
        if point.version != self.model.version:
            levels = levels_of(point.role, point.boundary, point.num_new, point.turns, point.hits, point.gap_s)
            point.level = self.model.level(point.role, levels)
            point.version = self.model.version
        return tokens / num_bytes * self.model.worth(point.role, point.level, now - point.since)

    def __contains__(self, item: object) -> bool:
        return item in self._offered

    def __len__(self) -> int:
        return len(self._offered)

    def learned(self) -> Learned:
        return self.model.learned()
