# SPDX-License-Identifier: Apache-2.0
"""Regions of the ring never overlap, and there is none only when no gap is large enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_overlay.transfer.regions import Regions

SIZE = 64


@given(st.lists(st.tuples(st.booleans(), st.integers(1, SIZE + 1)), max_size=60))
def test_regions_are_disjoint_and_come_back_in_any_order(steps: list[tuple[bool, int]]) -> None:
    regions = Regions(SIZE)
    taken: dict[int, int] = {}
    for frees, number in steps:
        if frees and taken:
            start = list(taken)[number % len(taken)]
            regions.free(start)
            del taken[start]
            continue
        free = "".join("x" if any(at <= n < at + size for at, size in taken.items()) else " " for n in range(SIZE))
        start = regions.allocate(number)
        assert (start is None) == (" " * number not in free)
        if start is not None:
            assert free[start : start + number] == " " * number
            taken[start] = number
        assert regions.num_free == SIZE - sum(taken.values())


def test_a_region_is_given_back_once() -> None:
    regions = Regions(SIZE)
    start = regions.allocate(8)
    assert start is not None
    regions.free(start)
    with pytest.raises(StopIteration):
        regions.free(start)
