# SPDX-License-Identifier: Apache-2.0
"""Writers: what the dead and those who leave have to unlink, and which files are theirs."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import Engine, files, writer_name
from vllm_overlay.tiers.disk.catalogue import File, Limits


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
