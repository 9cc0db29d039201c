# SPDX-License-Identifier: Apache-2.0
"""Restore points that may go, to draw some of them by chance."""

import random

from vllm_overlay.tiers.policies.runs import Point

SAMPLE = 64
"""Points that are compared at one eviction."""


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
