# SPDX-License-Identifier: Apache-2.0
"""What a tier holds of one prompt, group by group, and the largest boundary at which every group can be restored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.geometry import Geometry, Group
from vllm_overlay.planner.objects import ObjectId


class HitSource(Protocol):
    """The questions a lookup asks a tier. Chunks of a full-attention group must be prefix-closed in it."""

    def has(self, object_id: ObjectId) -> bool:
        """Whether the object can be loaded now."""

    def nearest_snapshot_chunk(self, object_id: ObjectId) -> int:
        """The end, in tokens, of the nearest chunk that has snapshots hanging below it; 0 when there is none.

        The search starts at the full-attention chunk ``object_id``, itself included, and goes up its own chain of
        parents. The snapshots may belong to other prompts, which left this one after that chunk.
        """

    def was_evicted(self, object_id: ObjectId) -> bool:
        """Whether the tier had this chunk of full attention and has evicted it, as far as it remembers.

        Asked only of chunks that it does not have, for the count of lost tokens.
        """


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a tier holds of one prompt.

    ``tokens`` is by vLLM's id of the attention group. For full attention it has the tokens of the leading chunks. For a
    sliding window it has the tokens of the chunks that the window needs at the restore point.

    ``restore_point`` is 0 when there is none above the local hit. ``reach`` is the last restore point that full
    attention alone would allow, 0 when there is no such group. ``reach_before_eviction`` is what ``reach`` would be if
    nothing had been evicted, as far as the tier remembers.

    ``group_id`` is the group that ``limited_by`` speaks of, if any. ``window_reach`` is the highest boundary above the
    local hit that windows alone can rule out. It is above ``restore_point`` where they did.
    """

    tokens: dict[int, int]
    restore_point: int
    reach: int
    limited_by: Reason
    group_id: int | None = None
    window_reach: int = 0
    reach_before_eviction: int = 0


def count_covered(num_chunks: int, has_chunk: Callable[[int], bool]) -> int:
    """Counts the leading chunks that are there, of a prefix-closed sequence of ``num_chunks``, in O(log n) probes."""
    low, high = 0, num_chunks
    while low < high:
        middle = (low + high + 1) // 2
        if has_chunk(middle - 1):
            low = middle
        else:
            high = middle - 1
    return low


class CoverageSearch:
    """One lookup of one prompt in one tier. Made and run by the planner, then thrown away.

    It takes O(log n) probes for each full-attention group. For snapshots it takes a ``nearest_snapshot_chunk`` and at
    most chunk / U probes for each chunk tried. Further chunks are tried only when all snapshots of the last one were
    other prompts'.

    Without a full-attention group nothing narrows the search, and boundaries are probed downwards one by one. Each
    window chunk is probed at most once. A missing one rules out every boundary whose window it is in.
    """

    def __init__(
        self, geometry: Geometry, keys: Sequence[bytes], num_tokens: int, num_local: int, view: HitSource
    ) -> None:
        self._geometry = geometry
        self._keys = keys
        self._num_local = num_local
        self._view = view
        self._limit = max(0, min(num_tokens - 1, len(keys) * geometry.match_unit))
        self._window_probes: dict[ObjectId, bool] = {}

    def run(self) -> Coverage:
        geometry = self._geometry
        tokens = {group.group_id: self._leading_tokens(group) for group in geometry.full}
        reach = geometry.floor_to_restore_point(min(tokens.values(), default=0))
        before = min(
            (self._tokens_before_eviction(group, tokens[group.group_id]) for group in geometry.full), default=0
        )
        # A snapshot holds the tokens up to one chunk beyond the covered ones.
        tops = [tokens[group.group_id] + geometry.chunk_size_of(group) - 1 for group in geometry.full]
        window_reach = self._candidate(geometry.floor_to_restore_point(min([*tops, self._limit])))
        restore_point, gap = self._restore_point(window_reach)
        reason, group_id = self._limited_by(max(restore_point, self._num_local), tokens, reach, gap)
        for group in geometry.windows:
            needed = geometry.window_chunks(group, restore_point)
            tokens[group.group_id] = len(needed) * geometry.chunk_size_of(group)
        before = geometry.floor_to_restore_point(before)
        return Coverage(tokens, restore_point, reach, reason, group_id, window_reach, before)

    def _leading_tokens(self, group: Group) -> int:
        size = self._geometry.chunk_size_of(group)
        count = count_covered(
            self._limit // size, lambda index: self._view.has(self._geometry.chunk_id(self._keys, group, index))
        )
        return count * size

    def _tokens_before_eviction(self, group: Group, covered: int) -> int:
        """The reach of the leading chunks that are here or were evicted. Later chunks went first, and are forgotten
        first."""
        size = self._geometry.chunk_size_of(group)
        first = covered // size

        def was_evicted(index: int) -> bool:
            return self._view.was_evicted(self._geometry.chunk_id(self._keys, group, first + index))

        num_missing = self._limit // size - first
        if not num_missing or not was_evicted(0):
            return covered
        return covered + count_covered(num_missing, was_evicted) * size

    def _restore_point(self, boundary: int) -> tuple[int, Group | None]:
        """The restore point, the first candidate given, and the window group that ruled that one out, if one did."""
        blamed = None
        while boundary > self._num_local:
            gap = self._window_gap(boundary)
            if gap is None:
                return boundary, blamed
            group, end = gap
            blamed = blamed or group
            boundary = self._candidate(self._geometry.floor_to_restore_point(end - 1))
        return 0, blamed

    def _candidate(self, top: int) -> int:
        """The highest boundary up to ``top`` (a multiple of the restore unit) that only windows can still rule out."""
        if not self._geometry.recurrent:
            return top
        if self._geometry.anchor is None:
            return self._snapshot_between(self._num_local, top)
        return self._snapshot_below_chunks(self._geometry.anchor, top)

    def _snapshot_below_chunks(self, anchor: Group, top: int) -> int:
        """The highest snapshot up to ``top``, going from chunk to chunk of ``anchor`` that has snapshots."""
        size = self._geometry.chunk_size_of(anchor)
        index = top // size - 1
        while True:
            end = 0
            if index >= 0:
                end = self._view.nearest_snapshot_chunk(self._geometry.chunk_id(self._keys, anchor, index))
            last = self._geometry.floor_to_restore_point(min(top, end + size - 1))
            boundary = self._snapshot_between(max(self._num_local, end - 1), last)
            if boundary or end <= self._num_local:
                return boundary
            index = end // size - 2

    def _snapshot_between(self, low: int, high: int) -> int:
        """The highest boundary in (``low``, ``high``] with a snapshot, 0 when none; ``high`` is a restore point."""
        for boundary in range(high, max(low, 0), -self._geometry.restore_unit):
            if self._view.has(self._geometry.snapshot_id(self._keys, boundary)):
                return boundary
        return 0

    def _window_gap(self, boundary: int) -> tuple[Group, int] | None:
        """The first missing chunk that a window needs at ``boundary``: its group and its end in tokens."""
        for group in self._geometry.windows:
            for index in self._geometry.window_chunks(group, boundary, self._num_local):
                object_id = self._geometry.chunk_id(self._keys, group, index)
                if object_id not in self._window_probes:
                    self._window_probes[object_id] = self._view.has(object_id)
                if not self._window_probes[object_id]:
                    return group, (index + 1) * self._geometry.chunk_size_of(group)
        return None

    def _limited_by(
        self, reached: int, tokens: dict[int, int], reach: int, blamed: Group | None
    ) -> tuple[Reason, int | None]:
        """Why nothing above ``reached`` (the restore point or the local hit) can be restored."""
        last = self._geometry.floor_to_restore_point(self._limit)
        if reached >= last:
            if self._limit < self._geometry.match_unit:
                return Reason.NONE, None
            whole_units_lost = self._limit - reached >= self._geometry.match_unit
            return Reason.GRANULARITY if whole_units_lost else Reason.PROMPT_END, None
        if blamed is not None:
            return Reason.WINDOW, blamed.group_id
        if tokens and reached >= reach:
            return Reason.ATTENTION, min(tokens, key=tokens.__getitem__)
        return Reason.STATE, None
