# SPDX-License-Identifier: Apache-2.0
"""What a file system has for objects, and a sentence with values that work where that is less than the settings say."""

from dataclasses import dataclass

from vllm_overlay.config import MIB, as_size


@dataclass(frozen=True, slots=True)
class Quota:
    """In bytes. ``largest_bytes`` is the most that an object may take, in all ranks' files together, and ``step_bytes``
    what a full step stores, where that is known."""

    capacity_bytes: int
    min_free_bytes: int
    largest_bytes: int
    step_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """Less than two of the largest objects is no tier: one may be in use while the next is written."""
        return 2 * self.largest_bytes

    def at_once_bytes(self, capacity_bytes: int, num_writers: int) -> int:
        """Room for two steps' stores, which come at once, while those of the first are on their way. All writers
        together hold no more than an 8th of the capacity for that."""
        return min(2 * self.step_bytes, capacity_bytes // 8 // max(1, num_writers))


@dataclass(frozen=True, slots=True)
class Volume:
    """What is free on the file system of a root, and what objects take of it, in bytes."""

    free_bytes: int
    own_bytes: int = 0

    def usable_bytes(self, quota: Quota) -> int:
        """What all objects together may take: a file system smaller than the capacity is the limit."""
        return max(0, min(quota.capacity_bytes, self.own_bytes + self.free_bytes - quota.min_free_bytes))

    def shortage(self, quota: Quota, root: str, total_bytes: int) -> str:
        """Empty when all of ``capacity_bytes`` can be had under ``root``, whose file system has ``total_bytes``."""
        usable, most = self.usable_bytes(quota), total_bytes - quota.min_free_bytes
        if usable == quota.capacity_bytes:
            return ""
        has = f"its file system has {as_size(total_bytes)}"
        others = f"others use {as_size(max(0, total_bytes - self.free_bytes - self.own_bytes))}"
        kept = f"min_free_bytes={as_size(quota.min_free_bytes)}"
        if usable >= quota.least_bytes:
            return (
                f"{root} holds at most {as_size(usable)} of capacity_bytes={as_size(quota.capacity_bytes)}: {has}, of "
                f"which {others} and {kept} stay free. Set capacity_bytes to at most "
                f"{as_size(usable)}, or root to a larger file system"
            )
        if most >= quota.least_bytes:
            wanted = quota.least_bytes + quota.min_free_bytes - self.own_bytes - self.free_bytes
            return (
                f"nothing can be stored under {root} now: {has}, of which {others} and "
                f"{kept} stay free. Free {as_size(wanted + MIB)} there, or set min_free_bytes lower"
            )
        keep = total_bytes // 8
        if total_bytes - keep >= quota.least_bytes:
            return (
                f"nothing can be stored under {root}: {has}, and {kept} of it stay free. Set min_free_bytes to "
                f"{as_size(keep)} and capacity_bytes to at most {as_size(total_bytes - keep)}, or root to a larger "
                "file system"
            )
        return (
            f"nothing can be stored under {root}: {has}, and two of this model's largest objects take "
            f"{as_size(quota.least_bytes)}. Set root to a larger file system"
        )
