# SPDX-License-Identifier: Apache-2.0
"""What is least worth its bytes goes first: the tokens that a restore point adds, by its bytes, by how soon it is used.

docs/eviction.md says why, and with what result.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import SNAPSHOT_TAG, ObjectId, ObjectKind
from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.policies import runs
from vllm_overlay.tiers.policies.base import EvictionPolicy, Ranked
from vllm_overlay.tiers.policies.ghosts import Ghosts
from vllm_overlay.tiers.policies.reuse import Learned, ReuseModel, Role
from vllm_overlay.tiers.policies.runs import Candidates, Point, Run
from vllm_overlay.tiers.policies.value import Shape, Values, levels

UNFINISHED_S = 10.0
"""For so long a prompt's chunks wait for its first state before they are ranked."""
WINDOWS_LOOKED_AT = 16
"""Of a window's chunks, in one call, before something else is evicted."""


class LearnedEviction(EvictionPolicy[Entry]):
    """Evicts by unit: a restore point and the chunks that only it needs.

    Of 64 points drawn by chance the one goes whose (tokens beyond the point above it / bytes that go with it) x (reuses
    a second, ``ReuseModel.worth``) is the least. Chunks that no point needs any more go before that.

    ``clock`` gives seconds that never go back. ``learned`` is what an earlier policy's ``learned`` returned; without it
    the prior of ``ReuseModel`` holds at first. Same calls, same times and same ``seed``: same victims.

    Memory beside the index's entries: one number an entry, a run and a point for each restore point, and what does not
    grow: ``NUM_GHOSTS`` ghosts and what the model watches. ``bench/eviction_cost.py`` measures it.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, seed: int = 0, learned: Learned | None = None
    ) -> None:
        self._clock = clock
        self._model = ReuseModel(learned)
        self._candidates = Candidates(random.Random(seed))
        self._shape = Shape()
        self._values = Values(self._model, self._shape)
        self._offered: dict[Entry, None] = {}
        self._windows: dict[Entry, None] = {}
        """Offered chunks of windows, the longest unseen first."""
        self._dead: dict[Run, None] = {}
        """Runs without a point, with nothing on top: the first to go."""
        self._victim: Run | None = None
        """A run without a snapshot that is being evicted."""
        self._growing: dict[Run, None] = {}
        """Runs of a model without states that a prompt may still be adding to."""
        self._ghosts = Ghosts()

    def serve(self, geometry: Geometry) -> None:
        self._shape = Shape.of(geometry)
        self._values = Values(self._model, self._shape)

    def learned(self) -> Learned:
        """What to start the next policy with."""
        return self._model.learned()

    # What happens to objects.

    def stored(self, items: Sequence[Entry]) -> None:
        start = 0
        for end, (item, following) in enumerate(itertools.zip_longest(items, items[1:]), 1):
            tag = item.object_id.tag
            if following is not None and following.object_id.tag == tag and following.parents == (item,):
                continue
            if tag == SNAPSHOT_TAG:
                self._snapshot_stored(item)
            elif tag[0] == "f":
                self._chunks_stored(items[start:end])
            start = end

    def used(self, items: Sequence[Entry]) -> None:
        self._describe_grown()
        point = self._used_point(items)
        if point is None:
            return
        now = self._clock()
        self._model.end(point.role, point.watch, now)
        point.hits += 1
        if point.role in (Role.SUPERSEDED, Role.SPECULATIVE):
            point.role = Role.JUNCTION
        self._watch(point, now)
        for run in point.runs:
            run.is_closed = True
        if self._victim in point.runs:
            self._victim = None

    def removed(self, items: Sequence[Entry]) -> None:
        item = items[-1]
        unit = item.unit
        if isinstance(unit, Run):
            self._chunks_removed(items, unit)
        elif isinstance(unit, Point):
            self._remove_point(unit)
        elif item.object_id.kind is ObjectKind.SLIDING_WINDOW:
            self._window_removed(item)
        for item in items:
            item.unit = None

    # What may go.

    def add(self, item: Entry, last_use: int, end_tokens: int) -> None:
        self._offered[item] = None
        unit = item.unit
        if isinstance(unit, Run):
            for point in unit.points:
                if point.place < 0:
                    self._candidates.add(point)
        elif isinstance(unit, Point):
            self._candidates.add(unit)
        elif item.object_id.kind is ObjectKind.SLIDING_WINDOW:
            self._windows[item] = None
            if (run := self._run_of_window(item)) is not None and self._is_needed(item):
                for point in run.points:
                    self._candidates.add(point)

    def discard(self, item: Entry) -> None:
        if self._offered.pop(item, item) is item:
            return
        unit = item.unit
        if unit is None:
            self._windows.pop(item, None)
        elif isinstance(unit, Point):
            self._candidates.discard(unit)
        # Of a chunk nothing: its run has grown, most often, and goes on being a candidate.

    def pop(self) -> Entry | None:
        for run in self._dead:
            if self._offered.pop(run.tail, run) is not run:
                return run.tail
        item = self._first_to_go()
        if item is not None:
            self.discard(item)
        return item

    def _first_to_go(self) -> Entry | None:
        for run in self._dead:
            if (item := self._last_of(run)) is not None:
                return item
        if (window := self._useless_window()) is not None:
            return window
        if self._victim is not None and (item := self._last_of(self._victim)) is not None:
            return item
        while (point := self._least()) is not None:
            if (item := self._begin_with(point)) is not None:
                return item
            self._candidates.discard(point)
        return next(iter(self._windows), None) or next(iter(self._offered), None)

    def _least(self) -> Point | None:
        """Of equals the deepest."""
        now = self._clock()
        least, least_value = None, 0.0
        for point in self._candidates.draw():
            value = self._values.of(point, now)
            if least is None or value < least_value or (value == least_value and point.boundary > least.boundary):
                least, least_value = point, value
        return least

    def _begin_with(self, point: Point) -> Entry | None:
        if point.entry is not None:
            return point.entry if point.entry in self._offered else None
        (run,) = point.runs
        if run.is_leaf:
            self._victim = run
        return self._last_of(run)

    def _last_of(self, run: Run) -> Entry | None:
        """What may go of a run's end: the window of its last chunk, then the chunk."""
        if run.tail in self._offered:
            return run.tail
        return next((child for child in run.tail.children if child in self._windows), None)

    def _useless_window(self) -> Entry | None:
        """A chunk of a window that no point needs. Others are put back, so that each is looked at in its turn."""
        for _ in range(min(WINDOWS_LOOKED_AT, len(self._windows))):
            window = next(iter(self._windows))
            if not self._is_needed(window):
                return window
            del self._windows[window]
            self._windows[window] = None
        return None

    def _is_needed(self, window: Entry) -> bool:
        """Whether the point at the end of its run has it in its window."""
        run = self._run_of_window(window)
        if run is None:
            return True
        return bool(run.points) and window.end_tokens > run.tail.end_tokens - self._shape.window_tokens

    @staticmethod
    def _run_of_window(window: Entry) -> Run | None:
        run = window.parents[0].unit if window.parents else None
        return run if isinstance(run, Run) else None

    # What somebody else evicts.

    def ranking(self) -> Iterator[Ranked]:
        """What was stored or used here. Of what was only found, nobody here knows when it was used last.

        A prompt that has no state yet may be being stored. It is not ranked for a while: what comes next of it hangs on
        what would go.
        """
        for run in list(self._dead):
            if run.is_dead and run.tail.ticket > 0:
                yield Ranked(run.tail.object_id, 0.0, None, self._clock())
        for window in list(self._windows):
            if window in self._windows and window.ticket > 0 and not self._is_needed(window):
                yield Ranked(window.object_id, 0.0, None, self._clock())
        ranked: set[Point] = set()
        for candidate in self._candidates.all():
            if candidate.place < 0:
                continue
            for point in [candidate, *self._points_below(candidate, ranked)]:
                now = self._clock()
                if self._is_own(point) and not self._is_unfinished(point, now):
                    until = point.since if point is candidate else now
                    first, *others = self._first_of(point)
                    yield Ranked(first, self._values.of(point, now), point.since, until, tuple(others))

    def _points_below(self, candidate: Point, ranked: set[Point]) -> list[Point]:
        """Of a dense model: those that may go once the candidate is gone, but for ``ranked``, which they are then."""
        found: list[Point] = []
        run = next(iter(candidate.runs)).parent if self._shape.is_dense else None
        while run is not None and ranked.isdisjoint(run.points):
            found += run.points
            ranked.update(run.points)
            run = run.parent
        return found

    def _is_unfinished(self, point: Point, now: float) -> bool:
        return self._shape.has_states and point.entry is None and now - point.since < UNFINISHED_S

    def _first_of(self, point: Point) -> list[ObjectId]:
        """Of what goes with a point, the objects that nothing of it hangs on."""
        found = [point.entry] if point.entry is not None else [run.tail for run in point.runs]
        for run in point.runs:
            chunk: Entry | None = run.tail
            while chunk is not None and chunk.end_tokens > run.tail.end_tokens - self._shape.window_tokens:
                found += [child for child in chunk.children if child.object_id.kind is ObjectKind.SLIDING_WINDOW]
                chunk = runs.chunk_above(chunk)
        return [item.object_id for item in found]

    @staticmethod
    def _is_own(point: Point) -> bool:
        """Whether it is still there, and was stored or used here: not by another process or in an earlier life."""
        if point.entry is not None:
            return bool(point.hits or point.entry.ticket > 0)
        return any(point.hits or run.tail.ticket > 0 for run in point.runs)

    # How restore points come and go.

    def _chunks_stored(self, chunks: Sequence[Entry]) -> None:
        """One on top of the other. They belong to the run that ends above them, unless that one ends there for good."""
        first, tail = chunks[0], chunks[-1]
        run = self._run_ending_at(first.parents[0]) if first.parents else None
        if run is None or run.children or run.is_closed:
            run = self._begin(first, run)
        elif run.is_dead:
            self._revive(run)
            self._open(run)
        for chunk in chunks:
            chunk.unit = run
        run.tail = tail
        run.num_bytes += sum([chunk.num_bytes for chunk in chunks])
        for point in run.points:
            point.boundary = tail.end_tokens
            point.version = -1
        if self._victim is run:
            self._victim = None
        self._ghosts.pass_by(run, [chunk.object_id.key for chunk in chunks])

    def _begin(self, chunk: Entry, parent: Run | None) -> Run:
        run = Run(0 if parent is None else parent.tail.end_tokens, parent, chunk)
        if parent is not None:
            parent.children[run] = None
            for point in parent.points:
                if point.entry is None and not self._shape.window_bytes:
                    self._candidates.discard(point)
        self._open(run)
        return run

    def _open(self, run: Run) -> None:
        """Gives a run the point that its prompt will end at."""
        point = Point(run.tail.end_tokens, Role.END, self._clock(), {run: None})
        run.points[point] = None
        if not self._shape.has_states:
            self._growing[run] = None

    def _run_ending_at(self, chunk: Entry) -> Run:
        run = chunk.unit
        assert isinstance(run, Run)
        if run.tail is chunk:
            return run
        return runs.split(run, chunk)

    def _snapshot_stored(self, entry: Entry) -> None:
        ending = [self._run_ending_at(chunk) for chunk in entry.parents]
        is_revisited = any(run.is_dead or self._parts_at(run) for run in ending)
        for run in ending:
            self._drop_open_point(run)
            self._revive(run)
        role = Role.JUNCTION if is_revisited else Role.END
        point = Point(entry.end_tokens, role, self._clock(), dict.fromkeys(ending), entry=entry)
        entry.unit = point
        for run in ending:
            run.points[point] = None
            run.is_closed = True
        if ending:
            self._describe(point, ending[0])
        else:
            self._watch(point, point.since)

    def _drop_open_point(self, run: Run) -> None:
        for point in [one for one in run.points if one.entry is None]:
            self._candidates.discard(point)
            del run.points[point]
            point.runs.clear()

    def _describe_grown(self) -> None:
        """In a model without states a prompt's point is complete when the next request comes, as far as one can see."""
        for run in self._growing:
            for point in run.points:
                self._describe(point, run)
        self._growing.clear()

    def _describe(self, point: Point, run: Run) -> None:
        """A new point: what is known of its conversation."""
        above = runs.point_above(run)
        if above is not None and point.role is Role.END:
            self._continue(above, point)
        point.num_new = self._tokens_since(above, point)
        self._meet_ghost(run, point)
        self._watch(point, point.since)

    @staticmethod
    def _tokens_since(above: Point | None, point: Point) -> int:
        if above is None:
            return point.boundary
        return point.boundary - above.boundary + (above.num_new if above.role is Role.SPECULATIVE else 0)

    def _parts_at(self, run: Run) -> bool:
        """Whether another prompt has gone on from here. One that is still being stored is the one that is here."""
        return any(child.children or child.is_dead or child.is_closed for child in run.children)

    def _continue(self, above: Point, point: Point) -> None:
        """``point`` comes next after ``above`` in one prompt."""
        if above.role is Role.END:
            self._model.cancel(above.role, above.watch)
            above.role = Role.SUPERSEDED if above.hits else Role.SPECULATIVE
            self._watch(above, point.since)
        if above.role in (Role.SUPERSEDED, Role.SPECULATIVE):
            point.turns = above.turns + (above.role is Role.SUPERSEDED)

    def _meet_ghost(self, run: Run, point: Point) -> None:
        """The deepest point that is gone and that this prompt would have used."""
        ghost = self._ghosts.met_by(run)
        if ghost is None:
            return
        self._model.end(ghost.role, ghost.watch, point.since)
        if ghost.boundary == point.boundary:
            point.turns, point.hits = ghost.turns, ghost.hits + 1
            if ghost.role is not Role.END:
                point.role = Role.JUNCTION
        elif ghost.role in (Role.END, Role.SUPERSEDED):
            point.turns = ghost.turns + 1
            point.num_new = max(0, point.boundary - ghost.boundary)

    def _used_point(self, items: Sequence[Entry]) -> Point | None:
        """Where a request goes on that uses these: the deepest snapshot, or without states the deepest chunk."""
        wanted = ObjectKind.SNAPSHOT if self._shape.has_states else ObjectKind.FULL_ATTENTION
        found = [item for item in items if item.object_id.kind is wanted]
        if not found:
            return None
        last = max(found, key=lambda item: item.end_tokens)
        if isinstance(last.unit, Point):
            return last.unit
        run = self._run_ending_at(last)
        if not run.points:
            point = Point(last.end_tokens, Role.JUNCTION, self._clock(), {run: None})
            point.num_new = self._tokens_since(runs.point_above(run), point)
            run.points[point] = None
            self._revive(run)
        return next(iter(run.points))

    def _watch(self, point: Point, now: float) -> None:
        point.since = now
        point.version = -1
        if self._is_own(point):
            point.watch = self._model.begin(point.role, levels(point), now)

    def _remove_point(self, point: Point) -> None:
        self._candidates.discard(point)
        ending = list(point.runs)
        if ending:
            self._ghosts.remember(point, ending[0].tail.object_id.key)
        point.entry = None
        point.runs.clear()
        for run in ending:
            del run.points[point]
            self._settle(run)

    def _settle(self, run: Run) -> None:
        """A run that may have lost what it was kept for: it goes, or belongs to what is on top of it."""
        if run.points:
            return
        run.is_closed = False
        if run.is_leaf:
            run.is_dead = True
            self._dead[run] = None
        elif len(run.children) == 1:
            self._ghosts.forget(run)
            runs.join(run)

    def _revive(self, run: Run) -> None:
        if run.is_dead:
            run.is_dead = False
            del self._dead[run]

    def _window_removed(self, window: Entry) -> None:
        """Without it no request can go on at the point that needed it."""
        run = self._run_of_window(window)
        if run is not None and self._is_needed(window):
            for point in [one for one in run.points if one.entry is None]:
                self._remove_point(point)

    def _chunks_removed(self, chunks: Sequence[Entry], run: Run) -> None:
        """They are the last of their run: what is on top of a chunk is removed before it."""
        run.num_bytes -= sum([chunk.num_bytes for chunk in chunks])
        for point in run.points:
            for chunk in chunks:
                if point.boundary == chunk.end_tokens:
                    self._ghosts.remember(point, chunk.object_id.key)
        chunk = chunks[-1]
        if chunk.parents and chunk.parents[0].unit is run:
            run.tail = chunk.parents[0]
        else:
            self._forget(run)

    def _forget(self, run: Run) -> None:
        """A run without chunks."""
        for point in run.points:
            self._candidates.discard(point)
            point.runs.clear()
        run.points.clear()
        self._ghosts.forget(run)
        self._growing.pop(run, None)
        self._dead.pop(run, None)
        if self._victim is run:
            self._victim = None
        parent, run.parent = run.parent, None
        if parent is not None:
            del parent.children[run]
            self._settle(parent)
