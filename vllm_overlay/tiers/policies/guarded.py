# SPDX-License-Identifier: Apache-2.0
"""A policy that may fail: the order by last use takes its place, and nothing else notices."""

import logging
from collections.abc import Iterator, Sequence
from typing import TypeVar

from vllm_overlay.planner.geometry import Geometry
from vllm_overlay.tiers.policies.base import EvictionPolicy, Ranked
from vllm_overlay.tiers.policies.lru import LeastRecentlyUsed

T = TypeVar("T")
logger = logging.getLogger(__name__)


class GuardedPolicy(EvictionPolicy[T]):
    """Another policy, until one of its methods raises or it names what may not go. From then on, for good: the longest
    unused first.

    Made by the factory around every policy but that one. What is in a tier stays, and can be loaded.
    """

    def __init__(self, policy: EvictionPolicy[T]) -> None:
        self._policy = policy
        self._offered: dict[T, tuple[int, int]] = {}
        """With its last use and its end in tokens, for the policy that may have to take over."""

    def serve(self, geometry: Geometry) -> None:
        self._tell("serve", geometry)

    def stored(self, items: Sequence[T]) -> None:
        self._tell("stored", items)

    def used(self, items: Sequence[T]) -> None:
        self._tell("used", items)

    def removed(self, items: Sequence[T]) -> None:
        self._tell("removed", items)

    def add(self, item: T, last_use: int, end_tokens: int) -> None:
        self._offered[item] = last_use, end_tokens
        try:
            self._policy.add(item, last_use, end_tokens)
        except Exception as error:
            self._fall_back(error)

    def discard(self, item: T) -> None:
        self._offered.pop(item, None)
        self._tell("discard", item)

    def _tell(self, event: str, *args: object) -> None:
        try:
            getattr(self._policy, event)(*args)
        except Exception as error:
            self._fall_back(error)

    def pop(self) -> T | None:
        try:
            item = self._policy.pop()
            if item is not None and item not in self._offered:
                raise ValueError(f"{item!r} may not be evicted")
        except Exception as error:
            self._fall_back(error)
            item = self._policy.pop()
        if item is not None:
            del self._offered[item]
        return item

    def ranking(self) -> Iterator[Ranked]:
        try:
            yield from self._policy.ranking()
        except Exception as error:
            self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        logger.error(
            "eviction policy %s failed: from now on the longest unused goes first",
            type(self._policy).__name__,
            exc_info=error,
        )
        self._policy = LeastRecentlyUsed()
        for item, (last_use, end_tokens) in self._offered.items():
            self._policy.add(item, last_use, end_tokens)
