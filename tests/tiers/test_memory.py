# SPDX-License-Identifier: Apache-2.0
"""Where a pool's memory comes from."""

import re
from pathlib import Path

import pytest

from vllm_overlay.tiers.memory import HostPool, UnitAllocator

FLAGS = re.compile(r"^VmFlags: (.*)$")
RANGE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


def flags_at(address: int) -> set[str]:
    """What the kernel notes about the mapping of an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := RANGE.match(line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and (noted := FLAGS.match(line)):
            return set(noted[1].split())
    raise AssertionError("no mapping has that address")


def test_a_pool_asks_for_huge_pages_and_stays_out_of_forked_children() -> None:
    """Reads into small pages went at a third of the speed; a fork would make a read end in a copied page."""
    pool = HostPool(16, 1 << 20)
    flags = flags_at(pool.array.ctypes.data)
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    assert {"hg", "dc"} <= flags
    assert "sh" not in flags


def test_rows_are_page_aligned_and_zero() -> None:
    pool = HostPool(3, 8192)
    assert pool.array.ctypes.data % 4096 == 0
    assert not pool.array.any()


def test_free_rows_are_given_in_order_and_the_last_freed_first() -> None:
    """So runs of chunks are runs of rows, and warm memory is used again."""
    units = UnitAllocator(6)
    assert units.allocate(3) == (0, 1, 2)
    units.free((0, 1))
    assert units.allocate(3) == (0, 1, 3)
    assert units.allocate(3) is None and units.num_free == 2
