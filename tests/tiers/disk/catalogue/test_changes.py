# SPDX-License-Identifier: Apache-2.0
"""What a process learns of others after its load; rebuilds."""

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
from vllm_overlay.tiers.disk.catalogue import (
    Catalogue,
    FellBehind,
    Limits,
    Refusal,
    Scored,
    StoredObject,
    changes,
    load,
    replace_damaged,
)

OURS = [CHUNKS.fingerprint, SNAPSHOTS.fingerprint]


def test_what_others_stored_and_removed_arrives_in_order(tmp_path: Path) -> None:
    one, two = member(tmp_path), member(tmp_path, CHUNKS, OTHERS)
    seq, slices = one.load(OURS)
    assert list(slices) == []
    store(two, stored(0), stored(1, (0,)), stored(2, (1,)), stored(0, (), OTHERS))
    list(two.remove([name(2)]))
    found = one.changes_since(seq, OURS)
    assert found.changes == [stored(0), stored(1, (0,)), name(2)]
    assert one.changes_since(found.seq, OURS).changes == []
    one.close()
    two.close()


def test_an_object_that_went_and_came_again_is_there_in_the_end(tmp_path: Path) -> None:
    one = member(tmp_path)
    store(one, stored(0))
    one.end_removal(names(one.evict(Limits(1, 1), NOW)), 0, 0)
    store(one, stored(0, last_use=NOW + 1))
    assert one.changes_since(0, OURS).changes == [name(0), stored(0, last_use=NOW + 1)]
    one.close()


def test_many_changes_come_in_parts(tmp_path: Path) -> None:
    one = member(tmp_path)
    store(one, *map(stored, range(1500)))
    first = one.changes_since(0, OURS)
    second = one.changes_since(first.seq, OURS)
    assert (first.has_more, second.has_more) == (True, False)
    assert [item.ticket for item in first.changes + second.changes if isinstance(item, StoredObject)] == [*range(1500)]
    one.close()


def test_who_fell_behind_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_KEPT", 10)
    one = member(tmp_path)
    store(one, *map(stored, range(300)))
    seq, _ = one.load(OURS)
    assert len(one.changes_since(seq - 10, OURS).changes) == 10
    for wrong in (seq - 11, 0, seq + 1):
        with pytest.raises(FellBehind):
            one.changes_since(wrong, OURS)
    one.close()


def test_a_load_in_many_slices_while_others_write_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest number goes and another object comes between two slices: its children must not get a wrong parent."""
    monkeypatch.setattr(load, "SLICE_ROWS", 2)
    one, two = member(tmp_path), member(tmp_path)
    store(one, stored(0), stored(1, (0,)), stored(2, (1,)), stored(3))
    seq, slices = one.load(OURS)
    found = [*next(slices), *next(slices)]
    two.end_removal(names(next(iter(two.remove([name(3)])))), 0, 0)
    store(two, stored(4), stored(5, (4,)))
    found += [item for part in slices for item in part]
    assert [item.planned.parents for item in found] == [
        stored(number, parents).planned.parents
        for number, parents in ((0, ()), (1, (0,)), (2, (1,)), (3, ()), (4, ()), (5, (4,)))
    ]
    known = {item.name for item in found}
    for change in one.changes_since(seq, OURS).changes:
        known = known | {change.name} if isinstance(change, StoredObject) else known - {change}
    assert known == {item.name for item in loaded(two)}
    one.close()
    two.close()


# Rebuilds.


def test_a_new_catalogue_learns_from_one_member(tmp_path: Path) -> None:
    old = member(tmp_path)
    store(old, stored(0), stored(1, (0,)))
    replace_damaged(str(tmp_path), old.generation)
    old.close()
    one, two = Catalogue(str(tmp_path)), Catalogue(str(tmp_path))
    one.join([CHUNKS, SNAPSHOTS], NOW)
    two.join([CHUNKS, SNAPSHOTS], NOW)
    assert one.begin_rebuild() and one.begin_rebuild() and not two.begin_rebuild()
    with pytest.raises(ValueError, match="begin_rebuild"):
        two.adopt([stored(0)])
    result = one.adopt([stored(0), stored(1, (0,)), stored(3, (2,)), stored(0)])
    assert [(item.ticket, why) for item, why in result.refused] == [(3, Refusal.PARENT)]
    assert one.grant(1, 1, 1 << 40).num_bytes == 0
    one.end_rebuild()
    assert not two.begin_rebuild()
    assert numbers(loaded(two)) == [0, 1] and two.totals().num_bytes == 2 * 8192 and check(two) == []
    assert two.grant(1, 1, 1 << 40).num_bytes == 1
    one.close()
    two.close()


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rebuild_that_its_member_did_not_finish_is_taken_over(tmp_path: Path, leaves: bool) -> None:
    one, two = Catalogue(str(tmp_path)), Catalogue(str(tmp_path))
    one.join([CHUNKS], NOW)
    two.join([CHUNKS], NOW)
    one.begin_rebuild()
    one.adopt([stored(0)])
    assert not two.begin_rebuild()
    if leaves:
        one.leave()
    one.close()
    assert two.begin_rebuild()
    assert two.adopt([stored(0), stored(1, (0,))]).refused == []
    two.end_rebuild()
    assert two.totals().num_bytes == 2 * 8192 and check(two) == []
    two.close()


def test_who_takes_the_slot_of_a_rebuilder_that_left_is_none(tmp_path: Path) -> None:
    one, two, three = (Catalogue(str(tmp_path)) for _ in range(3))
    one.join([CHUNKS], NOW)
    two.join([CHUNKS], NOW)
    one.begin_rebuild()
    one.leave()
    assert three.join([CHUNKS], NOW) == 0
    assert two.begin_rebuild()
    for each in (one, two, three):
        each.close()


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    one = member(tmp_path)
    bad = stored(0)
    wrong = [
        StoredObject("x", bad.planned, 1, 1, 1, 1),
        StoredObject(bad.fingerprint, bad.planned, 0, 1, 1, 1),
        StoredObject(bad.fingerprint, bad.planned, 1, 1 << 60, 1, 1),
        StoredObject(bad.fingerprint, bad.planned, 1, 1, 1 << 70, 1),
        StoredObject(bad.fingerprint, bad.planned, 1, 1, 1, -1),
        stored(0, tag="x1"),
        stored(9, tuple(range(9))),
        stored(1, (0, 0)),
    ]
    for item in wrong:
        with pytest.raises(ValueError, match=r"cannot be kept|as parents"):
            one.commit([item])
    for score in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="Expected"):
            one.publish_scores([Scored(name(0), score, NOW)], NOW)
    for fingerprint in ("x", "A" * 64, "a" * 63):
        with pytest.raises(ValueError, match="Expected"):
            one.load([fingerprint])
    assert one.totals().num_objects == 0
    one.close()
