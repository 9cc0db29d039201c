# SPDX-License-Identifier: Apache-2.0
"""What an engine learns of others after its load; rebuilds."""

from pathlib import Path

import msgspec
import pytest

from tests.tiers.disk.catalogue.objects import (
    MODEL,
    NOW,
    OTHERS,
    PRIVATE,
    Engine,
    numbers,
    object_id,
    stored,
    writer_name,
)
from vllm_overlay.tiers.disk.catalogue import (
    FellBehind,
    File,
    Gone,
    Limits,
    Scored,
    StoredObject,
    Superseded,
    feed,
)

MINE = MODEL.fingerprint


def test_many_changes_come_in_parts(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.store(*map(one.stored, range(1500)))
    first = one.catalogue.changes_since(0, MINE)
    second = one.catalogue.changes_since(first.seq, MINE)
    assert (first.has_more, second.has_more) == (True, False)
    found = first.changes + second.changes
    assert numbers(item for item in found if isinstance(item, StoredObject)) == [*range(1500)]


def test_who_fell_behind_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_KEPT", 10)
    one = Engine(tmp_path)
    one.store(*map(one.stored, range(300)))
    seq, _ = one.catalogue.load(MINE)
    assert len(one.catalogue.changes_since(seq - 10, MINE).changes) == 10
    for wrong in (seq - 11, 0, seq + 1):
        with pytest.raises(FellBehind):
            one.catalogue.changes_since(wrong, MINE)


def test_a_load_in_many_slices_while_others_write_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest number goes and another object comes between two slices: its children must not get a wrong parent."""
    monkeypatch.setattr(feed, "_SLICE_ROWS", 2)
    one, two = Engine(tmp_path), Engine(tmp_path)
    one.store(one.stored(0), one.stored(1, (0,)), one.stored(2, (1,)), one.stored(3, last_use=1))
    seq, slices = one.catalogue.load(MINE)
    found = [*next(slices), *next(slices)]
    assert two.evicted(1) == [3]
    two.store(two.stored(4), two.stored(5, (4,)))
    found += [item for part in slices for item in part]
    assert [item.planned.parents for item in found] == [
        stored(number, parents).planned.parents
        for number, parents in ((0, ()), (1, (0,)), (2, (1,)), (3, ()), (4, ()), (5, (4,)))
    ]
    known = {item.object_id for item in found}
    for change in one.catalogue.changes_since(seq, MINE).changes:
        known = known - {change.object_id} if isinstance(change, Gone) else known | {change.object_id}
    assert known == {item.object_id for item in two.loaded()}


# Rebuilds.


def test_a_namespace_stays_private_though_an_engine_joins_before_its_objects_are_found(tmp_path: Path) -> None:
    one = Engine(tmp_path, is_complete=False)
    one.catalogue.adopt([], [PRIVATE])
    Engine(tmp_path, is_complete=False).close()
    one.catalogue.adopt([stored(0, (), PRIVATE)])
    assert [each.is_private for each in one.catalogue.usage() if each.fingerprint == PRIVATE.fingerprint] == [True]


def test_who_has_no_row_any_more_is_told_to_join_anew(tmp_path: Path) -> None:
    one, two = Engine(tmp_path), Engine(tmp_path)
    one.catalogue.bury(two.name, one.name)
    for call in (
        lambda: two.grant(1),
        lambda: two.catalogue.give_back(two.name, 1),
        lambda: two.commit(two.stored(0)),
        lambda: two.evict(Limits(1, 1)),
        lambda: two.catalogue.garbage(two.name),
        lambda: one.catalogue.bury(writer_name(5), two.name),
    ):
        with pytest.raises(Superseded, match="join anew"):
            call()
    two.catalogue.join(two.name, OTHERS)
    assert two.grant(8192).num_bytes == 8192


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    bad = one.stored(0)
    replace = msgspec.structs.replace
    wrong = [
        replace(bad, fingerprint="x"),
        replace(bad, world_size=0),
        replace(bad, num_bytes=1 << 60),
        replace(bad, file=File(one.name, 1 << 70)),
        replace(bad, file=File(one.name, -1)),
        replace(bad, last_use=-1),
        one.stored(0, kind="x1"),
        one.stored(0, kind="s"),
        one.stored(0, kind="s" + "A" * 16),
        one.stored(9, tuple(range(9))),
        one.stored(1, (0, 0)),
    ]
    for item in wrong:
        with pytest.raises(ValueError, match=r"cannot be kept|as parents|Expected"):
            one.commit(item)
    with pytest.raises(ValueError, match="cannot commit a file of"):
        one.commit(stored(0))
    for score in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="Expected"):
            one.catalogue.publish_scores(MINE, [Scored(object_id(0), score, NOW)], NOW)
    for fingerprint in ("x", "A" * 64, "a" * 63):
        with pytest.raises(ValueError, match="Expected"):
            one.catalogue.load(fingerprint)
    for writer in ("", "A" * 16, "0" * 15, "0" * 17, "../../../../../x"):
        with pytest.raises(ValueError, match="Expected"):
            one.catalogue.leave(writer)
    with pytest.raises(ValueError, match="16384"):
        one.catalogue.keep_learned(MINE, bytes(16385))
    with pytest.raises(ValueError, match="65536"):
        one.catalogue.join(one.name, replace(MODEL, words="ä" * 32769))
    assert one.catalogue.totals().num_objects == 0
