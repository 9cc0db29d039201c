# SPDX-License-Identifier: Apache-2.0
"""Chunks in runs, the restore points on them, and those that may go: what a policy that evicts by unit keeps of an
index.

Structs that the garbage collector passes by, as entries are. They refer to each other in circles, so whoever takes one
out takes it apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from vllm_overlay.tiers.entry import Entry
from vllm_overlay.tiers.policies.reuse import Role

SAMPLE = 64
"""Points that are compared at one eviction."""


class Point(msgspec.Struct, eq=False, gc=False):
    """A place where requests can go on: a snapshot, or the end of a run of chunks in a model without states."""

    boundary: int
    role: Role
    since: float
    """When it was used last, or stored."""
    runs: dict[Run, None]
    """Those whose last chunks it hangs on: one for each full-attention group."""
    entry: Entry | None = None
    """Its snapshot, if it has one."""
    num_new: int = 0
    """Tokens since the point above it."""
    turns: int = 0
    hits: int = 0
    watch: int = -1
    level: int = 0
    version: int = -1
    place: int = -1
    """Among those that may go; -1: it may not."""


class Run(msgspec.Struct, eq=False, gc=False):
    """Chunks of one group, one on top of the other, that are needed together: no prompt parts from another between
    them, and only the last one carries points."""

    start_tokens: int
    parent: Run | None
    tail: Entry
    num_bytes: int = 0
    children: dict[Run, None] = {}
    points: dict[Point, None] = {}
    is_closed: bool = False
    """Requests have gone on from its end, or can: what comes next is another run."""
    is_dead: bool = False
    """It has lost its points, and nothing on top of it has any."""

    @property
    def is_leaf(self) -> bool:
        return not self.children


class Candidates:
    """A set of points from which a sample is drawn in constant time. Each point knows its place in it."""

    def __init__(self, luck: random.Random) -> None:
        self._points: list[Point] = []
        self._draw = luck.random

    def __len__(self) -> int:
        return len(self._points)

    def all(self) -> list[Point]:
        """A copy, which a caller may walk while points come and go."""
        return list(self._points)

    def add(self, point: Point) -> None:
        if point.place < 0:
            point.place = len(self._points)
            self._points.append(point)

    def discard(self, point: Point) -> None:
        if point.place < 0:
            return
        last = self._points.pop()
        if last is not point:
            self._points[point.place] = last
            last.place = point.place
        point.place = -1

    def draw(self) -> list[Point]:
        """All of them, or a sample in which one may be twice."""
        count = len(self._points)
        if count <= SAMPLE:
            return self._points
        return [self._points[int(self._draw() * count)] for _ in range(SAMPLE)]


def chunk_above(entry: Entry) -> Entry | None:
    """The chunk before a chunk of full attention, which hangs on nothing else."""
    parents = entry.parents
    return parents[0] if parents else None


def chunks_of(run: Run) -> Iterator[Entry]:
    """From the last one upwards. The step above is taken before a chunk is given out."""
    chunk: Entry | None = run.tail
    while chunk is not None and chunk.unit is run:
        above = chunk_above(chunk)
        yield chunk
        chunk = above


def point_above(run: Run, passes: Sequence[Role] = ()) -> Point | None:
    """The nearest point above a run, but for those of the roles that it ``passes``."""
    above = run.parent
    while above is not None:
        found = [point for point in above.points if point.role not in passes]
        if found:
            return max(found, key=lambda point: point.boundary)
        above = above.parent
    return None


def split(run: Run, chunk: Entry) -> Run:
    """Cuts a run after ``chunk``, which is not its last; returns the new run that ends there."""
    head = Run(run.start_tokens, run.parent, chunk, children={run: None})
    if run.parent is not None:
        del run.parent.children[run]
        run.parent.children[head] = None
    above: Entry | None = chunk
    while above is not None and above.unit is run:
        above.unit = head
        head.num_bytes += above.num_bytes
        above = chunk_above(above)
    run.parent = head
    run.start_tokens = chunk.end_tokens
    run.num_bytes -= head.num_bytes
    return head


def join(run: Run) -> None:
    """Makes a run part of the only one on top of it."""
    (below,) = run.children
    for chunk in chunks_of(run):
        chunk.unit = below
    below.num_bytes += run.num_bytes
    below.start_tokens = run.start_tokens
    below.parent = run.parent
    if run.parent is not None:
        del run.parent.children[run]
        run.parent.children[below] = None
    run.children.clear()
    run.parent = None
