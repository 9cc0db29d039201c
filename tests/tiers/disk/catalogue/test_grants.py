# SPDX-License-Identifier: Apache-2.0
"""Room: how much of the capacity is used, and who gets it."""

from pathlib import Path

import pytest

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import NOW, Engine
from vllm_overlay.tiers.disk.catalogue import Committed, Limits

OBJECT = 8192
CAPACITY = 64 * 32 * OBJECT


class Storing:
    """An engine that stores all the time: what it lacks it evicts. ``part`` is of the numbers that it stores."""

    def __init__(self, engine: Engine, part: int) -> None:
        self.engine = engine
        self.next = part * 1_000_000
        self.stored_bytes = 0

    def step(self, num_objects: int = 4) -> None:
        grant = self.engine.grant(num_objects * OBJECT, OBJECT, CAPACITY)
        if grant.short_bytes:
            gone = self.engine.evict(Limits(grant.short_bytes, 64), NOW)
            self.engine.collected(gone, grant.short_bytes, CAPACITY)
        answers = self.engine.commit(*(self.engine.stored(self.next + number) for number in range(num_objects)))
        self.next += num_objects
        self.stored_bytes += sum(isinstance(answer, Committed) for answer in answers) * OBJECT


@pytest.mark.parametrize("num_engines", [1, 8, 31])
def test_engines_that_write_all_the_time_use_95_percent_of_the_capacity(tmp_path: Path, num_engines: int) -> None:
    storing = [Storing(Engine(tmp_path), number) for number in range(num_engines)]
    catalogue = storing[0].engine.catalogue
    for _ in range(2 * CAPACITY // OBJECT // 4 // num_engines):
        for each in storing:
            each.step()
        assert catalogue.totals().num_bytes <= CAPACITY
    assert catalogue.totals().object_bytes >= 0.95 * CAPACITY
    assert min(each.stored_bytes for each in storing) >= 0.9 * max(each.stored_bytes for each in storing)
    assert check(catalogue) == []
    for each in storing:
        each.engine.close()


def test_engines_that_take_what_they_get_and_write_nothing_leave_the_rest_95_percent(tmp_path: Path) -> None:
    idle = [Engine(tmp_path) for _ in range(30)]
    for each in idle:
        each.grant(CAPACITY, OBJECT, CAPACITY)
    for each in idle:
        each.catalogue.give_back(each.name, each.grant(0, OBJECT, CAPACITY).surplus_bytes)
    storing = Storing(Engine(tmp_path), 0)
    for _ in range(CAPACITY // OBJECT):
        storing.step(1)
    assert storing.engine.catalogue.totals().object_bytes >= 0.95 * CAPACITY
    for each in (*idle, storing.engine):
        each.close()


def test_what_is_short_is_what_must_be_evicted(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.store(*map(one.stored, range(10)), capacity_bytes=10 * OBJECT)
    grant = one.grant(3 * OBJECT, 3 * OBJECT, 11 * OBJECT)
    assert (grant.num_bytes, grant.short_bytes) == (OBJECT, 2 * OBJECT)
    gone = one.evict(Limits(grant.short_bytes, 64))
    assert one.grant(1, OBJECT, 11 * OBJECT).num_bytes == 0, "the files are still there"
    assert one.collected(gone, grant.short_bytes, 11 * OBJECT) == 2 * OBJECT
    assert one.catalogue.totals().num_bytes == 11 * OBJECT


def test_bytes_over_a_capacity_that_was_lowered_are_freed_for_nobody(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.store(*map(one.stored, range(10)))
    gone = one.evict(Limits(3 * OBJECT, 64))
    assert one.collected(gone, 3 * OBJECT, 8 * OBJECT) == OBJECT
    assert one.catalogue.totals().num_bytes == 8 * OBJECT
