# SPDX-License-Identifier: Apache-2.0
"""What a restore point is worth: the tokens that it adds, by the bytes that go with it, by how soon it is used."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tiers.policies.reuse import ReuseModel, Role, levels_of
from vllm_overlay.tiers.policies.runs import Point, point_above


@dataclass(frozen=True, slots=True)
class Shape:
    """What a policy must know of a model. ``window_bytes``: of the chunks of windows that one restore point needs."""

    has_states: bool = True
    window_tokens: int = 0
    window_bytes: int = 0

    @classmethod
    def of(cls, geometry: Geometry) -> "Shape":
        return cls(
            has_states=bool(geometry.recurrent),
            window_tokens=max((group.window for group in geometry.windows), default=0),
            window_bytes=sum(
                geometry.chunk_bytes(group) * -(-group.window // geometry.chunk_size_of(group))
                for group in geometry.windows
            ),
        )

    @property
    def is_dense(self) -> bool:
        """Whether a point is its run, and may not go before what is on top of it."""
        return not self.has_states and not self.window_bytes


class Values:
    """Of the points of one index."""

    def __init__(self, model: ReuseModel, shape: Shape) -> None:
        self._model = model
        self._shape = shape

    def of(self, point: Point, now: float) -> float:
        """Tokens a byte and second that are saved by keeping a point."""
        model = self._model
        if point.version != model.version:
            point.level = model.level(levels(point))
            point.version = model.version
        worth = model.worth(point.role, point.level, now - point.since)
        return self.tokens_of(point) / self.bytes_of(point) * worth

    def bytes_of(self, point: Point) -> int:
        """What goes with it: all that nothing on top of it and no other point needs."""
        shape = self._shape
        num_bytes = shape.window_bytes if point.entry is None else point.entry.num_bytes
        for run in point.runs:
            if len(run.points) == 1 and (not run.children or shape.is_dense):
                num_bytes += run.num_bytes
        return num_bytes or 1

    def tokens_of(self, point: Point) -> int:
        """Beyond the point above it. A point that stays counts as if those that will go before it were gone."""
        run = next(iter(point.runs), None)
        if run is None:
            return point.boundary
        if point.entry is None and not self._shape.window_bytes:
            return run.tail.end_tokens - run.start_tokens
        if run.parent is None:
            return point.boundary
        stays = point.role in (Role.END, Role.JUNCTION)
        above = point_above(run, (Role.SUPERSEDED, Role.SPECULATIVE) if stays else ())
        return point.boundary - (above.boundary if above is not None else 0)


def levels(point: Point) -> Sequence[int]:
    """The properties of a point that a ``ReuseModel`` knows it by."""
    return levels_of(point.role, point.boundary, point.num_new, point.turns, point.hits)
