# SPDX-License-Identifier: Apache-2.0
"""Room: how much of the capacity is used, and who gets it."""

from pathlib import Path

import pytest

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import MIB, NOW, member, names, store, stored
from vllm_overlay.tiers.disk.catalogue import Catalogue, Limits

OBJECT = 8192
CAPACITY = 64 * 32 * OBJECT


class Writer:
    """Stores all the time: what it lacks it evicts. ``part`` is of the numbers that it stores."""

    def __init__(self, catalogue: Catalogue, part: int) -> None:
        self.catalogue = catalogue
        self.next = part * 1_000_000
        self.stored_bytes = 0

    def step(self, num_objects: int = 4) -> None:
        wanted = num_objects * OBJECT
        grant = self.catalogue.grant(wanted, OBJECT, CAPACITY)
        if grant.short_bytes:
            gone = names(self.catalogue.evict(Limits(grant.short_bytes, 64), NOW))
            self.catalogue.end_removal(gone, grant.short_bytes, CAPACITY)
        items = [stored(self.next + number, last_use=NOW) for number in range(num_objects)]
        refused = self.catalogue.commit(items).refused
        self.next += num_objects
        self.stored_bytes += (num_objects - len(refused)) * OBJECT


@pytest.mark.parametrize("num_members", [1, 8, 31])
def test_members_that_write_all_the_time_use_95_percent_of_the_capacity(tmp_path: Path, num_members: int) -> None:
    writers = [Writer(member(tmp_path), number) for number in range(num_members)]
    for _ in range(2 * CAPACITY // OBJECT // 4 // num_members):
        for writer in writers:
            writer.step()
        assert writers[0].catalogue.totals().num_bytes <= CAPACITY
    assert writers[0].catalogue.totals().object_bytes >= 0.95 * CAPACITY
    assert min(writer.stored_bytes for writer in writers) >= 0.9 * max(writer.stored_bytes for writer in writers)
    assert check(writers[0].catalogue) == []
    for writer in writers:
        writer.catalogue.close()


def test_members_that_take_what_they_get_and_write_nothing_leave_the_rest_95_percent(tmp_path: Path) -> None:
    idle = [member(tmp_path) for _ in range(30)]
    for each in idle:
        each.grant(CAPACITY, OBJECT, CAPACITY)
    for each in idle:
        surplus = each.grant(0, OBJECT, CAPACITY).surplus_bytes
        each.give_back(surplus)
    writer = Writer(member(tmp_path), 0)
    for _ in range(CAPACITY // OBJECT):
        writer.step(1)
    assert writer.catalogue.totals().object_bytes >= 0.95 * CAPACITY
    for each in (*idle, writer.catalogue):
        each.close()


def test_what_is_short_is_what_must_be_evicted(tmp_path: Path) -> None:
    one = member(tmp_path)
    store(one, *(stored(number) for number in range(10)), capacity_bytes=10 * OBJECT)
    grant = one.grant(3 * OBJECT, 3 * OBJECT, 11 * OBJECT)
    assert (grant.num_bytes, grant.short_bytes) == (OBJECT, 2 * OBJECT)
    gone = one.evict(Limits(grant.short_bytes, 64), NOW)
    assert one.grant(1, OBJECT, 11 * OBJECT).num_bytes == 0, "the files are still there"
    assert one.end_removal(names(gone), grant.short_bytes, 11 * OBJECT) == 2 * OBJECT
    assert one.totals().num_bytes == 11 * OBJECT
    one.close()


def test_bytes_over_a_capacity_that_was_lowered_are_freed_for_nobody(tmp_path: Path) -> None:
    one = member(tmp_path)
    store(one, *(stored(number) for number in range(10)))
    gone = one.evict(Limits(3 * OBJECT, 64), NOW)
    assert one.end_removal(names(gone), 3 * OBJECT, 8 * OBJECT) == OBJECT
    assert one.totals().num_bytes == 8 * OBJECT
    one.close()


def test_an_object_larger_than_a_members_part_can_be_stored(tmp_path: Path) -> None:
    others = [member(tmp_path) for _ in range(8)]
    one = member(tmp_path)
    assert one.grant(MIB // 2, MIB // 2, MIB).num_bytes == MIB // 2
    assert one.grant(MIB // 2, MIB // 2, MIB).num_bytes == 0, "one at a time"
    for each in (one, *others):
        each.close()
