# SPDX-License-Identifier: Apache-2.0
"""What to load for a prompt, what to store of it, and under which names. The same code serves and is simulated."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vllm_overlay.common.reasons import Reason
from vllm_overlay.planner.coverage import Coverage, CoverageSearch, HitSource
from vllm_overlay.planner.geometry import Geometry, Group
from vllm_overlay.planner.lost_tokens import lost_tokens
from vllm_overlay.planner.objects import ObjectId, PlannedObject


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer to one lookup.

    ``num_new_tokens`` is what a load would add to the local hit, 0 when nothing. ``junction`` is the boundary at which
    a prefill should stop so that its state is kept: attention coverage reaches it, and no restore point does. It is 0
    when there is none. ``lost`` has the tokens beyond both the local hit and the restore point, by reason.
    """

    num_new_tokens: int
    junction: int
    coverage: Coverage
    lost: dict[Reason, int]

    @property
    def restore_point(self) -> int:
        """The boundary to restore at, in tokens of the prompt; 0 when none is above the local hit."""
        return self.coverage.restore_point

    @property
    def limited_by(self) -> Reason:
        return self.coverage.limited_by

    @property
    def limiting_group_id(self) -> int | None:
        """vLLM's id of the group that ``limited_by`` speaks of, if it is about one group."""
        return self.coverage.group_id


class HybridOffloadPlanner:
    """Plans loads and stores for one tier. Pure: it has no state but the geometry. Called by the scheduler's half.

    ``keys`` is ``request.block_hashes`` everywhere, or what an adapter's weights make of them: ``keys[i]`` names tokens
    [0, (i + 1) * U), where U is the match unit.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def lookup(self, keys: Sequence[bytes], num_tokens: int, num_local: int, view: HitSource) -> Lookup:
        """Finds the restore point of a prompt of ``num_tokens``, of which ``num_local`` are in the KV cache already.

        It is the largest boundary above ``num_local`` and at most ``num_tokens - 1`` at which every group can be
        restored. See ``CoverageSearch`` for what it costs.
        """
        coverage = CoverageSearch(self.geometry, keys, num_tokens, num_local, view).run()
        is_ahead = coverage.reach > max(coverage.restore_point, num_local)
        return Lookup(
            num_new_tokens=max(0, coverage.restore_point - num_local),
            junction=coverage.reach if self.geometry.recurrent and is_ahead else 0,
            coverage=coverage,
            lost=lost_tokens(self.geometry, coverage, len(keys), num_tokens, num_local),
        )

    def chunk(self, keys: Sequence[bytes], group: Group, index: int) -> PlannedObject:
        """The ``index``-th chunk of an attention group; ``keys`` must reach its end."""
        size = self.geometry.chunk_size_of(group)
        return PlannedObject(
            object_id=self.geometry.chunk_id(keys, group, index),
            parents=self._chunk_parents(keys, group, index),
            start_tokens=index * size,
            end_tokens=(index + 1) * size,
            num_bytes=self.geometry.chunk_bytes(group),
            group_id=group.group_id,
        )

    def _chain(self, keys: Sequence[bytes], group: Group, indices: range) -> list[PlannedObject]:
        """As ``chunk`` for each of ``indices``, of full attention: each chunk's name is the next one's parent."""
        if not indices:
            return []
        geometry = self.geometry
        size, num_bytes, group_id = geometry.chunk_size_of(group), geometry.chunk_bytes(group), group.group_id
        parents = self._chunk_parents(keys, group, indices.start)
        planned = []
        for name, index in zip(geometry.chunk_ids(keys, group, indices), indices, strict=True):
            start = index * size
            planned.append(PlannedObject(name, parents, start, start + size, num_bytes, group_id))
            parents = (name,)
        return planned

    def _chunk_parents(self, keys: Sequence[bytes], group: Group, index: int) -> tuple[ObjectId, ...]:
        """For full attention the chunk before it, for a window the anchor's last chunk that ends no later."""
        if group.is_full:
            return (self.geometry.chunk_id(keys, group, index - 1),) if index else ()
        if self.geometry.anchor is None:
            return ()
        return self._last_chunk(keys, self.geometry.anchor, (index + 1) * self.geometry.chunk_size_of(group))

    def _last_chunk(self, keys: Sequence[bytes], group: Group, end_tokens: int) -> tuple[ObjectId, ...]:
        """The last chunk of ``group`` that ends at or below ``end_tokens``, if there is one."""
        count = end_tokens // self.geometry.chunk_size_of(group)
        return (self.geometry.chunk_id(keys, group, count - 1),) if count else ()

    def first_missing(
        self, keys: Sequence[bytes], chunk: PlannedObject, has: Callable[[ObjectId], bool]
    ) -> PlannedObject:
        """The first chunk of the run of missing ones that ends with ``chunk``, of full attention."""
        group = next(group for group in self.geometry.full if group.group_id == chunk.group_id)
        size = self.geometry.chunk_size_of(group)
        while chunk.parents and not has(chunk.parents[0]):
            chunk = self.chunk(keys, group, chunk.start_tokens // size - 1)
        return chunk

    def snapshot(self, keys: Sequence[bytes], boundary: int) -> PlannedObject:
        """The snapshot of ``boundary``. Ask ``geometry.is_restore_point`` first: raises ValueError when it is none."""
        if not self.geometry.is_restore_point(boundary):
            raise ValueError(f"boundary {boundary} is not a multiple of the restore unit {self.geometry.restore_unit}")
        parents = [parent for group in self.geometry.full for parent in self._last_chunk(keys, group, boundary)]
        return PlannedObject(
            object_id=self.geometry.snapshot_id(keys, boundary),
            parents=tuple(parents),
            start_tokens=boundary - self.geometry.tail_tokens(boundary),
            end_tokens=boundary,
            num_bytes=self.geometry.snapshot_bytes(boundary),
        )

    def load_plan(self, keys: Sequence[bytes], num_local: int, restore_point: int) -> list[PlannedObject]:
        """What to load to go on at ``restore_point``, a lookup's answer, beyond ``num_local`` local tokens.

        ``num_local`` is a multiple of every block size. Full-attention chunks come first, then windows', then the
        snapshot when the model has recurrent groups. Empty when ``restore_point`` is not above ``num_local``.
        """
        if restore_point <= num_local:
            return []
        geometry = self.geometry
        planned = []
        for group in geometry.full:
            size = geometry.chunk_size_of(group)
            planned += self._chain(keys, group, range(num_local // size, restore_point // size))
        for group in geometry.windows:
            needed = geometry.window_chunks(group, restore_point, num_local)
            planned += [self.chunk(keys, group, index) for index in needed]
        if geometry.recurrent:
            planned.append(self.snapshot(keys, restore_point))
        return planned

    def last_needed(self, keys: Sequence[bytes], boundary: int) -> list[ObjectId]:
        """The objects to mark as used when a request goes on at ``boundary``: those that nothing else of its prefix
        depends on.

        A tier evicts leaves first, so what a marked object depends on stays for as long. To mark the last chunk of full
        attention is as good as marking all of them. These are names, whether the tier has the objects or not.
        """
        boundary = min(boundary, len(keys) * self.geometry.match_unit)
        if boundary <= 0:
            return []
        found = [object_id for group in self.geometry.full for object_id in self._last_chunk(keys, group, boundary)]
        for group in self.geometry.windows:
            found += [
                self.geometry.chunk_id(keys, group, index) for index in self.geometry.window_chunks(group, boundary)
            ]
        if self.geometry.is_restore_point(boundary) and self.geometry.recurrent:
            found.append(self.geometry.snapshot_id(keys, boundary))
        return found

    def store_plan(
        self, keys: Sequence[bytes], cursors: Mapping[int, int], computed_tokens: int
    ) -> list[PlannedObject]:
        """The chunks that became complete, parents first: full attention by position, then windows.

        ``cursors`` has for each attention group, by vLLM's id, the tokens considered before (none: 0). The caller
        advances it, to ``end_tokens`` of each planned chunk. ``computed_tokens`` counts tokens whose KV is in the cache
        after this step. What ``keys`` do not reach is left for a later step.
        """
        computed_tokens = min(computed_tokens, len(keys) * self.geometry.match_unit)
        full = [
            chunk for group in self.geometry.full for chunk in self._complete(keys, group, cursors, computed_tokens)
        ]
        full.sort(key=operator.attrgetter("end_tokens"))
        windows = [
            chunk for group in self.geometry.windows for chunk in self._complete(keys, group, cursors, computed_tokens)
        ]
        return full + windows

    def _complete(
        self, keys: Sequence[bytes], group: Group, cursors: Mapping[int, int], computed_tokens: int
    ) -> list[PlannedObject]:
        size = self.geometry.chunk_size_of(group)
        first = -(-cursors.get(group.group_id, 0) // size)
        complete = range(first, computed_tokens // size)
        return self._chain(keys, group, complete) if group.is_full else [self.chunk(keys, group, i) for i in complete]
