# SPDX-License-Identifier: Apache-2.0
"""Objects that were not right, or could not be read. Neither they nor what builds on them is offered meanwhile."""

import math
import time
from collections.abc import Collection, Sequence

from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.planner.objects import ObjectId, ObjectKind
from vllm_overlay.tiers.index import PrefixIndex

UNREADABLE_S = 60.0
"""How long an object that could not be read is not offered."""
_MOST = 4096


class Hidden:
    """At most 4,096 objects, the latest, each until it is stored anew or its time is over. Not thread-safe."""

    def __init__(self) -> None:
        self._until: dict[ObjectId, float] = {}

    def add(self, object_id: ObjectId, seconds: float = math.inf) -> None:
        until = max(time.monotonic() + seconds, self._until.pop(object_id, 0.0))
        self._until[object_id] = until
        if len(self._until) > _MOST:
            del self._until[next(iter(self._until))]

    def discard(self, object_id: ObjectId) -> None:
        self._until.pop(object_id, None)

    def __contains__(self, object_id: ObjectId) -> bool:
        until = self._until.get(object_id)
        if until is None or time.monotonic() < until:
            return until is not None
        del self._until[object_id]
        return False

    def among(self, keys: Collection[bytes]) -> set[ObjectId]:
        """Those of a prompt's keys."""
        return {object_id for object_id in list(self._until) if object_id.key in keys and object_id in self}

    def __bool__(self) -> bool:
        return bool(self._until)


class VisibleHits:
    """Implements ``HitSource`` for one lookup of one prompt: the index without what is hidden.

    A hidden chunk of full attention hides all of the prompt that ends where it does or later, because that builds on
    it.
    """

    def __init__(
        self, index: PrefixIndex, hidden: Collection[ObjectId], geometry: Geometry, keys: Sequence[bytes]
    ) -> None:
        self._index = index
        self._hidden = hidden
        self._ends = {key: (place + 1) * geometry.match_unit for place, key in enumerate(keys)}
        chunks = (object_id for object_id in hidden if object_id.kind is ObjectKind.FULL_ATTENTION)
        self._gap = min((self._ends.get(chunk.key, math.inf) for chunk in chunks), default=math.inf)

    def has(self, object_id: ObjectId) -> bool:
        is_visible = object_id not in self._hidden and self._ends[object_id.key] < self._gap
        return is_visible and self._index.has(object_id)

    def nearest_snapshot_chunk(self, object_id: ObjectId) -> int:
        return self._index.nearest_snapshot_chunk(object_id)

    def was_evicted(self, object_id: ObjectId) -> bool:
        return self._index.was_evicted(object_id)
