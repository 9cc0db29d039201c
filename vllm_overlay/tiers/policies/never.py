# SPDX-License-Identifier: Apache-2.0
"""No order, for a tier that evicts by something else than its index."""

from typing import TypeVar

from vllm_overlay.tiers.policies.base import EvictionPolicy

T = TypeVar("T")


class NeverEvicts(EvictionPolicy[T]):
    """Knows what may go, and lets nothing go. Every call takes the same short time."""

    def __init__(self) -> None:
        self._offered: dict[T, None] = {}

    def add(self, item: T, last_use: int, end_tokens: int) -> None:
        self._offered[item] = None

    def discard(self, item: T) -> None:
        self._offered.pop(item, None)

    def pop(self) -> T | None:
        return None

    def __contains__(self, item: object) -> bool:
        return item in self._offered

    def __len__(self) -> int:
        return len(self._offered)
