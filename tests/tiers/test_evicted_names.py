# SPDX-License-Identifier: Apache-2.0
"""How far back evictions are remembered."""

from vllm_overlay.planner.objects import ObjectId
from vllm_overlay.tiers.index import EvictedNames


def name(number: int) -> ObjectId:
    return ObjectId("f0", number.to_bytes(4, "big"))


def test_the_last_ones_are_remembered_and_no_more_than_twice_as_many() -> None:
    names = EvictedNames(half=100)
    for number in range(1000):
        names.add([name(number)])
        remembered = [each for each in range(max(0, number - 250), number + 1) if name(each) in names]
        assert min(number + 1, 100) <= len(remembered) <= 200
        assert remembered == list(range(remembered[0], number + 1))
    assert ObjectId("f1", name(999).key) not in names
