# SPDX-License-Identifier: Apache-2.0
"""Which objects go."""

from pathlib import Path

import pytest

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import (
    CHUNKS,
    NOW,
    OTHERS,
    SNAPSHOTS,
    loaded,
    member,
    name,
    names,
    numbers,
    store,
    stored,
)
from vllm_overlay.tiers.disk.catalogue import Catalogue, Limits, Name, Namespace, Refusal, Scored

MANY = 1 << 40


def evicted(catalogue: Catalogue, count: int, pinned: frozenset[Name] = frozenset()) -> list[Name]:
    return names(catalogue.evict(Limits(MANY, count, pinned), NOW + 100))


def test_two_percent_of_a_shared_prefix_with_1000_leaves_cut_off_nothing(tmp_path: Path) -> None:
    one = member(tmp_path)
    prefix = [stored(0), *(stored(number, (number - 1,)) for number in range(1, 20))]
    leaves = [stored(1000 + number, (19,), last_use=NOW + number % 7) for number in range(1000)]
    store(one, *prefix, *leaves)
    one.touch([item.name for item in leaves[:500]], NOW + 50)
    gone = set(evicted(one, 20))
    assert gone < {item.name for item in leaves[500:]}
    left = {item.planned.object_id for item in loaded(one)}
    assert len(left) == 1000
    assert all(parent in left for item in loaded(one) for parent in item.planned.parents)
    assert check(one) == []
    one.close()


def test_a_parent_goes_in_the_same_call_once_its_last_child_has(tmp_path: Path) -> None:
    one = member(tmp_path)
    store(one, stored(0), stored(1, (0,)), stored(2, (1,)), stored(3, last_use=NOW + 1))
    assert evicted(one, 10) == [name(2), name(1), name(0), name(3)]
    one.close()


def test_a_snapshot_holds_chunks_of_the_namespace_beside(tmp_path: Path) -> None:
    one = member(tmp_path)
    store(one, stored(0), stored(0, (0,), SNAPSHOTS, last_use=NOW + 5, tag="s"), stored(1, last_use=NOW + 9))
    assert evicted(one, 10) == [name(0, SNAPSHOTS, "s"), name(0), name(1)]
    one.close()


def test_what_nobody_serves_goes_first_and_temporary_before_it(tmp_path: Path) -> None:
    temporary = Namespace("d" * 64, "d" * 64, is_temporary=True)
    one, two, three = member(tmp_path), member(tmp_path, OTHERS), member(tmp_path, temporary)
    store(one, stored(0, last_use=1))
    store(two, stored(0, (), OTHERS, last_use=NOW + 8))
    store(three, stored(0, (), temporary, last_use=NOW + 9))
    two.leave()
    three.close()
    assert evicted(one, 10) == [name(0, temporary), name(0, OTHERS), name(0)]
    for each in (one, two):
        each.close()


def score(catalogue: Catalogue, expires_at: int, **scores: float) -> None:
    """Of objects by number, as ``_0``, whenever they were used."""
    catalogue.publish_scores([Scored(name(int(each[1:])), at, MANY) for each, at in scores.items()], expires_at)


def test_a_score_counts_as_a_last_use_until_it_expires(tmp_path: Path) -> None:
    one = member(tmp_path)
    store(one, *(stored(number, last_use=NOW + number) for number in range(4)))
    score(one, NOW + 10, _0=NOW + 2.5, _3=NOW)
    one.touch([name(1)], NOW + 8)
    victims = one.choose_victims(Limits(MANY, 10), NOW + 9)
    assert names(victims) == [name(3), name(2), name(0), name(1)]
    assert names(one.evict(Limits(MANY, 10), NOW + 10)) == [name(0), name(2), name(3), name(1)]
    one.close()


def test_a_use_is_later_than_a_score_of_before_whoever_published_it(tmp_path: Path) -> None:
    one, two = member(tmp_path), member(tmp_path)
    store(one, *(stored(number, last_use=NOW + number) for number in range(3)))
    score(one, NOW + 1000, _0=NOW - 2, _1=NOW - 1)
    two.touch([name(0)], NOW + 7)
    assert names(one.choose_victims(Limits(MANY, 10), NOW + 8)) == [name(1), name(2), name(0)]
    one.publish_scores([Scored(name(0), NOW - 2, until=NOW + 6), Scored(name(2), NOW - 2, until=NOW + 6)], NOW + 1000)
    assert names(one.choose_victims(Limits(MANY, 10), NOW + 8)) == [name(2), name(1), name(0)]
    one.close()
    two.close()


def test_what_hangs_on_nothing_else_goes_with_what_has_a_score(tmp_path: Path) -> None:
    one = member(tmp_path)
    store(one, stored(0, last_use=NOW + 9), stored(1, (0,), last_use=NOW + 9), stored(2, last_use=NOW + 5))
    store(one, stored(3, (1,), last_use=NOW + 9), stored(4, (0,), last_use=NOW + 9))
    score(one, NOW + 1000, _3=NOW, _4=NOW + 7)
    assert names(one.choose_victims(Limits(MANY, 10), NOW + 9)) == [name(number) for number in (3, 1, 2, 4, 0)]
    assert evicted(one, 1) + evicted(one, 1) == [name(3), name(1)]
    assert check(one) == []
    assert evicted(one, 10) == [name(2), name(4), name(0)]
    one.close()


def test_a_score_of_its_own_outlasts_what_was_on_top(tmp_path: Path) -> None:
    one = member(tmp_path)
    store(one, stored(0, last_use=NOW), stored(1, (0,), last_use=NOW), stored(2, last_use=NOW + 5))
    score(one, NOW + 1000, _0=NOW + 6, _1=NOW)
    assert names(one.choose_victims(Limits(MANY, 10), NOW + 9)) == [name(1), name(2), name(0)]
    assert evicted(one, 1) + evicted(one, 2) == [name(1), name(2), name(0)]
    one.close()


def test_more_expired_scores_than_a_batch_are_all_forgotten(tmp_path: Path) -> None:
    one = member(tmp_path)
    items = [stored(number, last_use=NOW + number) for number in range(600)]
    store(one, *items)
    one.publish_scores([Scored(item.name, 600.0 - number, MANY) for number, item in enumerate(items)], NOW + 1)
    assert names(one.evict(Limits(MANY, 3), NOW + 1)) == [name(0), name(1), name(2)]
    one.close()


def test_pinned_objects_and_what_they_need_stay(tmp_path: Path) -> None:
    one = member(tmp_path)
    store(one, stored(0), stored(1, (0,)), stored(2, (1,)), stored(3, (0,)))
    assert evicted(one, 10, frozenset([name(1)])) == [name(2), name(3)]
    one.close()


def test_two_members_never_choose_the_same(tmp_path: Path) -> None:
    one, two = member(tmp_path), member(tmp_path)
    store(one, *map(stored, range(10)))
    first, second = evicted(one, 4), evicted(two, 4)
    assert len({*first, *second}) == 8
    one.close()
    two.close()


def test_a_name_that_is_being_removed_is_not_taken(tmp_path: Path) -> None:
    one = member(tmp_path)
    store(one, stored(0))
    gone = evicted(one, 1)
    one.grant(8192, 8192, MANY)
    assert [why for _, why in one.commit([stored(0)]).refused] == [Refusal.REMOVING]
    one.end_removal(gone, 0, MANY)
    assert one.commit([stored(0)]).refused == []
    assert check(one) == []
    one.close()


def test_nobody_ends_the_removal_of_another(tmp_path: Path) -> None:
    one, two = member(tmp_path), member(tmp_path)
    store(one, stored(0))
    gone = evicted(one, 1)
    assert two.end_removal(gone, MANY // 2, MANY) == 0
    assert two.totals().removing_bytes == 8192
    assert one.end_removal(gone, MANY // 2, MANY) == 8192
    one.close()
    two.close()


def test_removing_an_object_removes_what_is_on_top_in_bounded_lists(tmp_path: Path) -> None:
    one = member(tmp_path)
    store(one, stored(0), *(stored(number, (number - 1,)) for number in range(1, 600)), stored(1000))
    store(one, stored(0, (300,), SNAPSHOTS, tag="s"))
    parts = list(one.remove([name(250)]))
    assert [len(part) for part in parts] == [256, 95]
    assert numbers(loaded(one)) == [*range(250), 1000]
    assert check(one) == []
    one.close()


def test_what_was_added_on_top_during_a_removal_goes_too(tmp_path: Path) -> None:
    one, two = member(tmp_path), member(tmp_path)
    store(one, stored(0), *(stored(number, (0,)) for number in range(1, 600)))
    parts = one.remove([name(0)])
    next(parts)
    store(two, stored(1000, (0,)))
    list(parts)
    assert loaded(one) == [] and check(one) == []
    one.close()
    two.close()


def test_the_same_name_again_counts_the_new_bytes_only(tmp_path: Path) -> None:
    one, two = member(tmp_path), member(tmp_path)
    store(one, stored(0, num_bytes=8192), stored(1, (0,)))
    store(two, stored(0, num_bytes=12288))
    assert one.totals().num_bytes == 12288 + 8192
    assert numbers(loaded(one)) == [0, 1] and check(one) == []
    one.close()
    two.close()


@pytest.mark.parametrize("limits", [Limits(0, 10), Limits(MANY, 0)])
def test_nothing_goes_for_nothing(tmp_path: Path, limits: Limits) -> None:
    one = member(tmp_path)
    store(one, stored(0))
    assert one.evict(limits, NOW) == []
    with pytest.raises(ValueError, match="256"):
        one.evict(Limits(1, 257), NOW)
    one.close()


def test_an_object_of_a_namespace_that_nobody_began_is_refused(tmp_path: Path) -> None:
    one = member(tmp_path, CHUNKS)
    one.grant(8192, 8192, MANY)
    assert [why for _, why in one.commit([stored(0, (), OTHERS)]).refused] == [Refusal.NAMESPACE]
    assert one.give_back(0) == 8192
    one.close()
