# SPDX-License-Identifier: Apache-2.0
"""Members: slots, what the dead leave, and namespaces."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import CHUNKS, MIB, NOW, OTHERS, SNAPSHOTS, member, name, names, store, stored
from vllm_overlay.tiers.disk.catalogue import Catalogue, Damaged, Limits, Namespace


def test_what_a_dead_member_was_granted_is_free_only_when_it_is_buried(tmp_path: Path) -> None:
    dying, other = member(tmp_path), member(tmp_path)
    store(dying, stored(1), capacity_bytes=MIB)
    dying.grant(MIB // 64, 0, MIB)
    dying.close()
    (dead,) = other.dead_members()
    assert (dead.granted_bytes, dead.fingerprints) == (MIB // 64, (CHUNKS.fingerprint, SNAPSHOTS.fingerprint))
    assert other.totals().num_bytes == 8192 + MIB // 64
    assert other.bury(dead.slot) == MIB // 64
    assert other.totals().num_bytes == 8192 and other.dead_members() == []
    other.close()


def test_files_that_a_dead_member_was_unlinking_are_named(tmp_path: Path) -> None:
    dying, other = member(tmp_path), member(tmp_path)
    store(dying, stored(1), stored(2))
    dying.evict(Limits(1, 1), NOW)
    dying.close()
    (dead,) = other.dead_members()
    assert names(list(dead.removals)) == [name(1)]
    assert other.bury(dead.slot) == 8192
    assert other.totals().num_bytes == 8192
    other.close()


def test_what_a_dead_member_was_unlinking_goes_to_one_heir_and_of_the_living_to_none(tmp_path: Path) -> None:
    dying, heir, late = member(tmp_path), member(tmp_path), member(tmp_path)
    store(dying, stored(1), stored(2))
    dying.evict(Limits(1, 1), NOW)
    slot = dying.slot
    assert heir.inherit(slot) == []
    dying.close()
    assert names(heir.inherit(slot)) == [name(1)]
    assert late.inherit(slot) == [] == late.inherit(heir.slot)
    assert late.bury(slot) == 0
    assert late.totals().removing_bytes == 8192
    heir.end_removal([name(1)], 0, MIB)
    assert late.totals().num_bytes == 8192 and check(late) == []
    heir.close()
    late.close()


def test_a_slot_of_the_dead_is_not_taken_before_it_is_buried(tmp_path: Path) -> None:
    member(tmp_path).close()
    second = member(tmp_path)
    assert second.slot == 1
    second.bury(0)
    third = member(tmp_path)
    assert third.slot == 0
    second.close()
    third.close()


def test_who_leaves_with_files_on_their_way_is_buried_later(tmp_path: Path) -> None:
    leaving, other = member(tmp_path), member(tmp_path)
    leaving.grant(20_000, 20_000, MIB)
    leaving.leave(in_flight_bytes=8192)
    (dead,) = other.dead_members()
    assert (dead.granted_bytes, other.bury(dead.slot)) == (8192, 8192)
    other.close()
    leaving.close()


def test_threads_of_one_process_take_turns(tmp_path: Path) -> None:
    one = member(tmp_path)

    def work(part: int) -> None:
        for number in range(part * 1000, part * 1000 + 30):
            store(one, stored(number))
            if number % 3 == 0:
                gone = names(one.evict(Limits(1, 1), NOW))
                assert one.end_removal(gone, 0, MIB) == 0

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, part) for part in range(4)]:
            done.result()
    assert one.totals().num_objects == 4 * 20 and check(one) == []
    one.close()


def test_a_living_member_cannot_be_buried(tmp_path: Path) -> None:
    one, other = member(tmp_path), member(tmp_path)
    one.grant(8192, 8192, MIB)
    assert other.bury(one.slot) == 0 and other.totals().granted_bytes == 8192
    one.close()
    other.close()


def test_a_namespace_that_is_said_to_have_another_partner_is_damage(tmp_path: Path) -> None:
    one = member(tmp_path)
    with pytest.raises(Damaged, match="parents"):
        one.serve([Namespace(SNAPSHOTS.fingerprint, OTHERS.fingerprint)], NOW)
    one.close()


def test_calls_that_need_a_member_say_so(tmp_path: Path) -> None:
    catalogue = Catalogue(str(tmp_path))
    for call in (lambda: catalogue.grant(1, 1, 1), catalogue.begin_rebuild, catalogue.leave):
        with pytest.raises(ValueError, match="join"):
            call()
    catalogue.close()


def test_a_namespace_is_kept_for_those_whose_partner_it_is(tmp_path: Path) -> None:
    one, other = member(tmp_path), member(tmp_path, OTHERS)
    store(one, stored(0, (), SNAPSHOTS, tag="s"))
    one.leave()
    one.close()
    assert other.drop_empty_namespaces() == [] and check(other) == []
    other.close()


def test_a_namespace_without_objects_and_members_can_be_forgotten(tmp_path: Path) -> None:
    one, other = member(tmp_path, OTHERS), member(tmp_path)
    one.leave()
    one.close()
    assert other.drop_empty_namespaces() == [OTHERS.fingerprint]
    assert [each.fingerprint for each in other.usage()] == [CHUNKS.fingerprint, SNAPSHOTS.fingerprint]
    other.close()
