# SPDX-License-Identifier: Apache-2.0
"""Objects that could not be read just now. For a while neither they nor what builds on them is offered."""

import math
from collections.abc import Collection, Sequence

from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, ObjectKind
from vllm_overlay.tiers.index import PrefixIndex

SUSPENDED_S = 60.0
"""How long an object that could not be read is not offered."""


class ReadableHits:
    """Implements ``HitSource`` for one lookup of one prompt: the index without what is suspended.

    A suspended chunk of full attention hides all of the prompt that ends where it does or later, because that builds on
    it.
    """

    def __init__(
        self, index: PrefixIndex, suspended: Collection[ObjectId], geometry: Geometry, keys: Sequence[bytes]
    ) -> None:
        self._index = index
        self._suspended = suspended
        self._ends = {key: (place + 1) * geometry.match_unit for place, key in enumerate(keys)}
        chunks = (object_id for object_id in suspended if object_id.kind is ObjectKind.FULL_ATTENTION)
        self._gap = min((self._ends.get(chunk.key, math.inf) for chunk in chunks), default=math.inf)

    def has(self, object_id: ObjectId) -> bool:
        is_readable = object_id not in self._suspended and self._ends[object_id.key] < self._gap
        return is_readable and self._index.has(object_id)

    def nearest_snapshot_chunk(self, object_id: ObjectId) -> int:
        return self._index.nearest_snapshot_chunk(object_id)

    def was_evicted(self, object_id: ObjectId) -> bool:
        return self._index.was_evicted(object_id)
