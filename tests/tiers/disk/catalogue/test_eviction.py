# SPDX-License-Identifier: Apache-2.0
"""Which objects go, and which file of an object counts."""

from collections.abc import Set
from pathlib import Path

import pytest

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.inside import reading
from tests.tiers.disk.catalogue.objects import (
    MANY,
    MODEL,
    NOW,
    Engine,
    numbers,
    stored,
)
from vllm_overlay.tiers.disk.catalogue import File, Limits, Namespace, Scored


def test_two_percent_of_a_shared_prefix_with_1000_leaves_cut_off_nothing(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    prefix = [one.stored(0), *(one.stored(number, (number - 1,)) for number in range(1, 20))]
    leaves = [one.stored(1000 + number, (19,), last_use=NOW + number % 7) for number in range(1000)]
    one.store(*prefix, *leaves)
    one.catalogue.touch(MODEL.fingerprint, [item.object_id for item in leaves[:500]], NOW + 50)
    assert set(one.evicted(20)) < set(numbers(leaves[500:]))
    left = {item.object_id for item in one.loaded()}
    assert len(left) == 1000
    assert all(parent in left for item in one.loaded() for parent in item.planned.parents)
    assert check(one.catalogue) == []


def test_more_expired_scores_than_a_batch_are_all_forgotten(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    items = [one.stored(number, last_use=NOW + number) for number in range(600)]
    one.store(*items)
    scored = [Scored(item.object_id, 600.0 - number, MANY) for number, item in enumerate(items)]
    one.catalogue.publish_scores(MODEL.fingerprint, scored, NOW + 1)
    assert numbers(one.evict(Limits(MANY, 3), NOW + 1)) == [0, 1, 2]


def test_what_may_not_go_after_all_stays_with_what_it_needs(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.store(one.stored(0), one.stored(1, (0,)), one.stored(2, (1,)), one.stored(3, (0,)))

    def may_go(asked: list[File]) -> Set[File]:
        return {*asked} - {File(one.name, 1)}

    assert numbers(one.catalogue.evict(one.name, Limits(MANY, 10), NOW, may_go)) == [2, 3]
    assert numbers(one.loaded()) == [0, 1] and check(one.catalogue) == []


def test_what_thousands_of_resets_have_left_is_no_damage_and_no_eviction_looks_at_all_of_it(tmp_path: Path) -> None:
    one = Engine(tmp_path, is_complete=False)
    left = [Namespace(f"{number:064x}", is_private=True) for number in range(10_001)]
    one.catalogue.adopt([stored(number, namespace=each) for number, each in enumerate(left)], left)
    one.catalogue.end_rebuild()
    one.store(one.stored(20_000))
    statements: list[str] = []
    with reading(one.catalogue) as db:
        db.set_trace_callback(statements.append)
    assert len(one.evicted(3)) == 3
    assert len(statements) < 50
    assert numbers(one.loaded()) == [20_000]
    assert len(one.catalogue.usage()) == 10_002
    assert check(one.catalogue) == []


def test_no_more_than_a_batch_goes_at_once(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    with pytest.raises(ValueError, match="256"):
        one.evict(Limits(1, 257))
