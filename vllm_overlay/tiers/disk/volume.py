# SPDX-License-Identifier: Apache-2.0
"""What a file system has for objects, and a sentence with values that work where that is less than the settings say."""

from dataclasses import dataclass

from vllm_overlay.config import GIB, MIB


@dataclass(frozen=True, slots=True)
class Quota:
    """In bytes. ``largest_bytes`` is the most that an object may take, in all ranks' files together."""

    capacity_bytes: int
    min_free_bytes: int
    largest_bytes: int

    @property
    def least_bytes(self) -> int:
        """Less than two of the largest objects is no tier: one may be in use while the next is written."""
        return 2 * self.largest_bytes


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
        has = f"its file system has {_words(total_bytes)}"
        others = f"others use {_words(max(0, total_bytes - self.free_bytes - self.own_bytes))}"
        kept = f"min_free_bytes={_words(quota.min_free_bytes)}"
        if usable >= quota.least_bytes:
            return (
                f"{root} holds at most {_words(usable)} of capacity_bytes={_words(quota.capacity_bytes)}: {has}, of "
                f"which {others} and {kept} stay free. Set capacity_bytes to at most "
                f"{_words(usable)}, or root to a larger file system"
            )
        if most >= quota.least_bytes:
            wanted = quota.least_bytes + quota.min_free_bytes - self.own_bytes - self.free_bytes
            return (
                f"nothing can be stored under {root} now: {has}, of which {others} and "
                f"{kept} stay free. Free {_words(wanted + MIB)} there, or set min_free_bytes lower"
            )
        keep = total_bytes // 8
        if total_bytes - keep >= quota.least_bytes:
            return (
                f"nothing can be stored under {root}: {has}, and {kept} of it stay free. Set min_free_bytes to "
                f"{_words(keep)} and capacity_bytes to at most {_words(total_bytes - keep)}, or root to a larger "
                "file system"
            )
        return (
            f"nothing can be stored under {root}: {has}, and two of this model's largest objects take "
            f"{_words(quota.least_bytes)}. Set root to a larger file system"
        )


def _words(num_bytes: int) -> str:
    """A size as the settings take it, no larger than ``num_bytes``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if num_bytes >= 64 * unit or (num_bytes >= unit and num_bytes % unit == 0):
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} bytes"
