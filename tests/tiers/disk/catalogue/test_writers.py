# SPDX-License-Identifier: Apache-2.0
"""Writers: what they hold, what the dead leave, and namespaces."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import (
    MIB,
    MODEL,
    OTHERS,
    PRIVATE,
    Engine,
    files,
    numbers,
    stored,
    writer_name,
)
from vllm_overlay.tiers.disk.catalogue import File, Limits, Namespace, WriterRow, replace_damaged


def test_what_a_dead_writer_was_granted_is_free_only_when_it_is_buried(tmp_path: Path) -> None:
    dying, other = Engine(tmp_path), Engine(tmp_path)
    dying.store(dying.stored(1), capacity_bytes=MIB)
    dying.grant(MIB // 64, 0, MIB)
    dying.close()
    assert WriterRow(dying.name, MODEL.fingerprint, MIB // 64) in other.catalogue.writers()
    assert other.catalogue.totals().num_bytes == 8192 + MIB // 64
    assert other.catalogue.bury(dying.name, other.name) == MIB // 64
    assert other.catalogue.totals().num_bytes == 8192
    assert other.catalogue.writers() == [WriterRow(other.name, MODEL.fingerprint, 0)]
    assert other.catalogue.bury(dying.name, other.name) == 0, "it is unknown by now"


def test_what_a_dead_writer_had_to_unlink_is_its_heirs(tmp_path: Path) -> None:
    dying, heir, late = Engine(tmp_path), Engine(tmp_path), Engine(tmp_path)
    dying.store(dying.stored(1), dying.stored(2))
    assert dying.evicted(1) == [1]
    dying.close()
    assert heir.catalogue.garbage(heir.name) == []
    heir.catalogue.bury(dying.name, heir.name)
    late.catalogue.bury(dying.name, late.name)
    assert late.catalogue.garbage(late.name) == []
    assert numbers(heir.catalogue.garbage(heir.name)) == [1]
    assert late.catalogue.totals().removing_bytes == 8192
    heir.collected(heir.catalogue.garbage(heir.name))
    assert late.catalogue.totals().num_bytes == 8192 and check(late.catalogue) == []


def test_what_who_leaves_had_to_unlink_is_anybodys(tmp_path: Path) -> None:
    leaving, one, two = Engine(tmp_path), Engine(tmp_path), Engine(tmp_path)
    leaving.store(*map(leaving.stored, range(5)))
    leaving.evicted(3)
    leaving.catalogue.leave(leaving.name)
    assert numbers(one.catalogue.garbage(one.name, most=1)) == [0]
    assert numbers(two.catalogue.garbage(two.name)) == [1, 2]
    assert numbers(two.catalogue.garbage(two.name, after=File(leaving.name, 1))) == [2]
    assert check(two.catalogue) == []


def test_nobody_is_buried_until_all_files_are_known(tmp_path: Path) -> None:
    dying, other = Engine(tmp_path), Engine(tmp_path)
    dying.store(dying.stored(1))
    dying.grant(8192)
    replace_damaged(str(tmp_path), other.catalogue.generation)
    one = Engine(tmp_path, is_complete=False)
    one.catalogue.join(dying.name, MODEL)
    one.catalogue.adopt([dying.stored(1)])
    before = one.catalogue.writers()
    assert one.catalogue.bury(dying.name, one.name) == 0
    assert one.catalogue.writers() == before and one.catalogue.numbers_of(dying.name) is None
    one.catalogue.end_rebuild()
    assert one.catalogue.numbers_of(dying.name) == {1}
    one.catalogue.bury(dying.name, one.name)
    assert [row.name for row in one.catalogue.writers()] == [one.name]


def test_nobody_buries_itself(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    with pytest.raises(ValueError, match="itself"):
        one.catalogue.bury(one.name, one.name)


def test_who_leaves_with_files_on_their_way_is_buried_later(tmp_path: Path) -> None:
    leaving, other = Engine(tmp_path), Engine(tmp_path)
    leaving.grant(20_000, 20_000, MIB)
    leaving.catalogue.leave(leaving.name, in_flight_bytes=8192)
    assert WriterRow(leaving.name, None, 8192) in other.catalogue.writers()
    assert other.catalogue.bury(leaving.name, other.name) == 8192


def test_to_join_twice_keeps_what_was_granted(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.grant(8192)
    one.catalogue.join(one.name, OTHERS)
    one.catalogue.join(one.name, OTHERS)
    assert one.catalogue.writers() == [WriterRow(one.name, OTHERS.fingerprint, 8192)]
    assert one.catalogue.totals().num_writers == 1


def test_files_of_writers_that_have_ended_are_known_by_name(tmp_path: Path) -> None:
    ended, one = Engine(tmp_path), Engine(tmp_path)
    ended.store(*map(ended.stored, range(3)))
    ended.evicted(1)
    ended.catalogue.leave(ended.name)
    assert one.catalogue.numbers_of(ended.name) == {0, 1, 2}
    asked = [File(ended.name, number) for number in range(600)] + [File(one.name, 0)]
    assert one.catalogue.named(asked) == set(asked[:3])
    assert files(one.loaded()) == asked[1:3]
    assert one.catalogue.numbers_of(writer_name(4)) == set()


def test_threads_of_one_process_take_turns(tmp_path: Path) -> None:
    one = Engine(tmp_path)

    def work(part: int) -> None:
        for number in range(part * 1000, part * 1000 + 30):
            one.store(one.stored(number))
            if number % 3 == 0:
                assert one.collected(one.evict(Limits(1, 1))) == 0

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, part) for part in range(4)]:
            done.result()
    assert one.catalogue.totals().num_objects == 4 * 20 and check(one.catalogue) == []


# Namespaces.


def known(engine: Engine) -> dict[str, str]:
    return {each.fingerprint: each.words for each in engine.catalogue.usage()}


def test_a_namespace_without_objects_that_nobody_serves_is_forgotten_with_what_was_learned(tmp_path: Path) -> None:
    one, other, full = Engine(tmp_path, PRIVATE), Engine(tmp_path), Engine(tmp_path, OTHERS)
    full.store(full.stored(0))
    for each in (one, full):
        each.catalogue.keep_learned(each.namespace.fingerprint, b"much")
        each.catalogue.leave(each.name)
    assert known(other) == {MODEL.fingerprint: MODEL.words, OTHERS.fingerprint: ""}
    other.catalogue.join(one.name, PRIVATE)
    assert other.catalogue.learned(PRIVATE.fingerprint) is None
    assert other.catalogue.learned(OTHERS.fingerprint) == b"much"
    other.catalogue.keep_learned("e" * 64, b"of nobody")
    assert other.catalogue.learned("e" * 64) is None


def test_after_a_reset_the_private_namespace_of_before_goes_once_it_is_empty(tmp_path: Path) -> None:
    one = Engine(tmp_path, PRIVATE)
    one.store(one.stored(0))
    one.catalogue.join(one.name, OTHERS)
    assert set(known(one)) == {PRIVATE.fingerprint, OTHERS.fingerprint}
    one.evicted(1)
    one.catalogue.join(one.name, OTHERS)
    assert set(known(one)) == {OTHERS.fingerprint}


def test_words_that_a_rebuild_did_not_know_come_with_who_serves(tmp_path: Path) -> None:
    one = Engine(tmp_path, OTHERS, is_complete=False)
    one.catalogue.adopt([stored(0)])
    assert known(one)[MODEL.fingerprint] == ""
    one.catalogue.join(writer_name(1), MODEL)
    one.catalogue.join(writer_name(2), Namespace(MODEL.fingerprint))
    assert known(one)[MODEL.fingerprint] == MODEL.words
