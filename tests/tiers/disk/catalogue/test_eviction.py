# SPDX-License-Identifier: Apache-2.0
"""Which objects go, and which file of an object counts."""

from collections.abc import Set
from pathlib import Path

import pytest

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import (
    MANY,
    MODEL,
    NOW,
    OTHERS,
    PRIVATE,
    SNAPSHOT,
    Engine,
    numbers,
    object_id,
    stored,
)
from vllm_overlay.tiers.disk.catalogue import Committed, File, Limits, Scored


def chosen(engine: Engine, now: int, count: int = 10) -> list[int]:
    return numbers(engine.catalogue.choose_victims(Limits(MANY, count), now))


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


def test_a_parent_goes_in_the_same_call_once_its_last_child_has(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.store(one.stored(0), one.stored(1, (0,)), one.stored(2, (1,)), one.stored(3, last_use=NOW + 1))
    assert one.evicted(10) == [2, 1, 0, 3]


def test_a_snapshot_holds_its_chunks(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    snapshot = one.stored(0, (0,), last_use=NOW + 5, kind=SNAPSHOT, file=70)
    one.store(one.stored(0), snapshot, one.stored(1, last_use=NOW + 9))
    assert one.evicted(10) == [70, 0, 1]


def test_what_nobody_serves_goes_first_and_private_before_it(tmp_path: Path) -> None:
    one, two, three = Engine(tmp_path), Engine(tmp_path, OTHERS), Engine(tmp_path, PRIVATE)
    one.store(one.stored(0, last_use=1))
    two.store(two.stored(1, last_use=NOW + 8))
    three.store(three.stored(2, last_use=NOW + 9))
    two.catalogue.leave(two.name)
    assert chosen(one, NOW) == [1, 0, 2], "nobody has buried the third writer: it serves"
    one.catalogue.bury(three.name, one.name)
    assert one.evicted(10) == [2, 1, 0]


def score(engine: Engine, expires_at: int, **scores: float) -> None:
    """Of objects by number, as ``_0``, whenever they were used."""
    scored = [Scored(object_id(int(each[1:])), at, MANY) for each, at in scores.items()]
    engine.catalogue.publish_scores(MODEL.fingerprint, scored, expires_at)


def test_a_score_counts_as_a_last_use_until_it_expires(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.store(*(one.stored(number, last_use=NOW + number) for number in range(4)))
    score(one, NOW + 10, _0=NOW + 2.5, _3=NOW)
    one.touch(1, NOW + 8)
    assert chosen(one, NOW + 9) == [3, 2, 0, 1]
    assert numbers(one.evict(Limits(MANY, 10), NOW + 10)) == [0, 2, 3, 1]


def test_a_use_is_later_than_a_score_of_before_whoever_published_it(tmp_path: Path) -> None:
    one, two = Engine(tmp_path), Engine(tmp_path)
    one.store(*(one.stored(number, last_use=NOW + number) for number in range(3)))
    score(one, NOW + 1000, _0=NOW - 2, _1=NOW - 1)
    two.touch(0, NOW + 7)
    assert chosen(one, NOW + 8) == [1, 2, 0]
    scores = [Scored(object_id(0), NOW - 2, until=NOW + 6), Scored(object_id(2), NOW - 2, until=NOW + 6)]
    one.catalogue.publish_scores(MODEL.fingerprint, scores, NOW + 1000)
    assert chosen(one, NOW + 8) == [2, 1, 0]


def test_what_hangs_on_nothing_else_goes_with_what_has_a_score(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    late = [one.stored(number, parents, last_use=NOW + 9) for number, parents in ((0, ()), (1, (0,)), (3, (1,)))]
    one.store(*late, one.stored(2, last_use=NOW + 5), one.stored(4, (0,), last_use=NOW + 9))
    score(one, NOW + 1000, _3=NOW, _4=NOW + 7)
    assert chosen(one, NOW + 9) == [3, 1, 2, 4, 0]
    assert one.evicted(1) + one.evicted(1) == [3, 1]
    assert check(one.catalogue) == []
    assert one.evicted(10) == [2, 4, 0]


def test_a_score_of_its_own_outlasts_what_was_on_top(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.store(one.stored(0), one.stored(1, (0,)), one.stored(2, last_use=NOW + 5))
    score(one, NOW + 1000, _0=NOW + 6, _1=NOW)
    assert chosen(one, NOW + 9) == [1, 2, 0]
    assert one.evicted(1) + one.evicted(2) == [1, 2, 0]


def test_more_expired_scores_than_a_batch_are_all_forgotten(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    items = [one.stored(number, last_use=NOW + number) for number in range(600)]
    one.store(*items)
    scored = [Scored(item.object_id, 600.0 - number, MANY) for number, item in enumerate(items)]
    one.catalogue.publish_scores(MODEL.fingerprint, scored, NOW + 1)
    assert numbers(one.evict(Limits(MANY, 3), NOW + 1)) == [0, 1, 2]


def test_pinned_files_and_what_they_need_stay(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.store(one.stored(0), one.stored(1, (0,)), one.stored(2, (1,)), one.stored(3, (0,)))
    assert one.evicted(10, frozenset([File(one.name, 1), File(one.name, 3)])) == [2]


def test_what_may_not_go_after_all_stays_with_what_it_needs(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.store(one.stored(0), one.stored(1, (0,)), one.stored(2, (1,)), one.stored(3, (0,)))

    def may_go(asked: list[File]) -> Set[File]:
        return {*asked} - {File(one.name, 1)}

    assert numbers(one.catalogue.evict(one.name, Limits(MANY, 10), NOW, may_go)) == [2, 3]
    assert numbers(one.loaded()) == [0, 1] and check(one.catalogue) == []


def test_an_unlink_twice_is_no_error_and_its_bytes_are_free_once(tmp_path: Path) -> None:
    one, two = Engine(tmp_path), Engine(tmp_path)
    one.store(one.stored(0), one.stored(1))
    gone = one.evict(Limits(1, 1))
    assert one.catalogue.totals().removing_bytes == 8192
    assert (one.collected(gone, MANY), two.collected(gone, MANY), one.collected(gone * 2, MANY)) == (8192, 0, 0)
    totals = one.catalogue.totals()
    assert (totals.object_bytes, totals.removing_bytes, totals.granted_bytes) == (8192, 0, 8192)


def test_no_more_than_a_batch_goes_at_once(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    with pytest.raises(ValueError, match="256"):
        one.evict(Limits(1, 257))


def test_a_replacement_needs_room_of_its_own(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.store(one.stored(0))
    assert one.commit(one.stored(0, file=1), replaced=File(one.name, 0)) == [None]
    assert numbers(one.loaded()) == [0] and check(one.catalogue) == []


def test_what_is_not_taken_in_costs_nothing(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.grant(8192)
    unknown = stored(0, (), OTHERS, file=4, writer=one.name)
    assert one.commit(one.stored(1, (0,)), unknown, one.stored(2), one.stored(3)) == [
        None, None, Committed(File(one.name, 2), is_paid=True), None,
    ]  # fmt: skip
    assert one.catalogue.totals().num_bytes == 8192 and check(one.catalogue) == []
