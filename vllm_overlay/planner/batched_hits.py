# SPDX-License-Identifier: Apache-2.0
"""Lookups in a store that answers in batches. It may hold objects without what they depend on, as a remote store
does."""

from collections.abc import Sequence
from typing import Protocol

from vllm_overlay.planner.geometry import Geometry, Group
from vllm_overlay.planner.objects import ObjectId, ObjectKind

BATCH_OBJECTS = 256
"""Objects asked about in one call."""


class BatchSource(Protocol):
    """A store that can be asked about many objects at once."""

    def has_each(self, object_ids: Sequence[ObjectId]) -> Sequence[bool]:
        """Whether each object can be loaded now, in the order of ``object_ids``: at most ``BATCH_OBJECTS``."""


class BatchedHits:
    """Implements ``HitSource`` for one lookup of one prompt. Made by ``TierManager.hits``, then thrown away.

    Chunks of full attention count up to the first missing one. So the answers are prefix-closed whatever the store
    holds. A question about one object asks about its neighbours too, in the direction in which a lookup goes on.
    """

    def __init__(self, geometry: Geometry, keys: Sequence[bytes], num_tokens: int, source: BatchSource) -> None:
        self._geometry = geometry
        self._keys = keys
        self._limit = max(0, min(num_tokens - 1, len(keys) * geometry.match_unit))
        self._source = source
        self._ends = {key: (place + 1) * geometry.match_unit for place, key in enumerate(keys)}
        self._groups = {geometry.tag(group): group for group in geometry.attention}
        self._leading_tokens: dict[str, int] = {}
        self._known: dict[ObjectId, bool] = {}

    def has(self, object_id: ObjectId) -> bool:
        if object_id.kind is ObjectKind.FULL_ATTENTION:
            return self._ends[object_id.key] <= self._leading(object_id.tag)
        if object_id not in self._known:
            self._ask(self._neighbours(object_id))
        return self._known[object_id]

    def nearest_snapshot_chunk(self, object_id: ObjectId) -> int:
        """Any chunk may have snapshots. Only asking about them tells."""
        return self._ends[object_id.key]

    def was_evicted(self, object_id: ObjectId) -> bool:
        """Such a store does not tell."""
        return False

    def _leading(self, tag: str) -> int:
        """Tokens of the leading chunks of a full-attention group."""
        if tag not in self._leading_tokens:
            self._leading_tokens[tag] = self._count_leading(self._groups[tag])
        return self._leading_tokens[tag]

    def _count_leading(self, group: Group) -> int:
        size = self._geometry.chunk_size_of(group)
        count = self._limit // size
        for first in range(0, count, BATCH_OBJECTS):
            batch = range(first, min(first + BATCH_OBJECTS, count))
            found = self._source.has_each([self._geometry.chunk_id(self._keys, group, index) for index in batch])
            for index, is_there in zip(batch, found, strict=True):
                if not is_there:
                    return index * size
        return count * size

    def _neighbours(self, object_id: ObjectId) -> list[ObjectId]:
        """The object, and those that a lookup asks about next: window chunks upwards, snapshots downwards."""
        end = self._ends[object_id.key]
        if object_id.is_snapshot:
            unit = self._geometry.restore_unit
            boundaries = range(end, 0, -unit)[:BATCH_OBJECTS]
            return [self._geometry.snapshot_id(self._keys, boundary) for boundary in boundaries]
        group = self._groups[object_id.tag]
        size = self._geometry.chunk_size_of(group)
        indexes = range(end // size - 1, self._limit // size)[:BATCH_OBJECTS]
        return [self._geometry.chunk_id(self._keys, group, index) for index in indexes]

    def _ask(self, object_ids: list[ObjectId]) -> None:
        self._known.update(zip(object_ids, self._source.has_each(object_ids), strict=True))
