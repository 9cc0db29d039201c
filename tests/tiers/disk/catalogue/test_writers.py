# SPDX-License-Identifier: Apache-2.0
"""Writers: what the dead and those who leave have to unlink, and which files are theirs."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import MODEL, OTHERS, Engine, files, numbers, stored, writer_name
from vllm_overlay.tiers.disk.catalogue import File, Limits, Namespace


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


def known(engine: Engine) -> dict[str, str]:
    return {each.fingerprint: each.words for each in engine.catalogue.usage()}


def test_words_that_a_rebuild_did_not_know_come_with_who_serves(tmp_path: Path) -> None:
    one = Engine(tmp_path, OTHERS, is_complete=False)
    one.catalogue.adopt([stored(0)])
    assert known(one)[MODEL.fingerprint] == ""
    one.catalogue.join(writer_name(1), MODEL)
    one.catalogue.join(writer_name(2), Namespace(MODEL.fingerprint))
    assert known(one)[MODEL.fingerprint] == MODEL.words
