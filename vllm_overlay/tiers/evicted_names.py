# SPDX-License-Identifier: Apache-2.0
"""Which objects a tier had and has evicted, as far back as it remembers."""

from collections.abc import Iterable

from vllm_overlay.planner.objects import ObjectId

_HALF = 1 << 16


class EvictedNames:
    """The names that were evicted last: at least ``_HALF`` of them, at most twice as many and one call's.

    That is about 9 MB: it keeps hashes of names. A name is taken for another one in one of 10^13 questions. Not
    thread-safe.
    """

    def __init__(self, half: int = _HALF) -> None:
        self._half = half
        self._newer: set[int] = set()
        self._older: set[int] = set()

    def add(self, object_ids: Iterable[ObjectId]) -> None:
        self._newer.update(map(hash, object_ids))
        if len(self._newer) >= self._half:
            self._newer, self._older = set(), self._newer

    def __contains__(self, object_id: ObjectId) -> bool:
        name = hash(object_id)
        return name in self._newer or name in self._older
