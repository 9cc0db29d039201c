# SPDX-License-Identifier: Apache-2.0
"""The index half: which objects it takes, and what loads, drops and reports do to them."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.disk.files import bytes_under, counted, object_files, on_disk
from tests.tiers.disk.inside import held_files, tell
from tests.tiers.disk.objects import GEOMETRY, OBJECT, chain
from tests.tiers.disk.tier_pair import TierPair, store_many, tier_pair
from tests.waiting import until
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue.generations import newest, path_of
from vllm_overlay.tiers.disk.messages import Found


@pytest.mark.parametrize(
    "planned",
    [
        PlannedObject(ObjectId("../f", b"k"), (), 0, 64, OBJECT),
        PlannedObject(ObjectId("f0", b"k" * 65), (), 0, 64, OBJECT),
        PlannedObject(ObjectId("f0", b"k"), (ObjectId("f0", b""),), 0, 64, OBJECT),
        PlannedObject(ObjectId("f0", b"k"), tuple(ObjectId("f0", bytes([n])) for n in range(9)), 0, 64, OBJECT),
        PlannedObject(ObjectId("f0", b"k"), (), 0, 64, 0),
    ],
)
def test_what_no_file_can_carry_is_not_reserved(tmp_path, planned):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
        assert made.tier.reserve(planned) is None


def test_what_a_load_holds_is_not_evicted(tmp_path):
    with tier_pair(tmp_path / "root", capacity_bytes=12 * on_disk(), eviction_policy="lru") as made:
        objects = chain("p", 2)
        made.store(objects)
        tickets = made.tier.acquire(objects)
        assert [ticket.object_id for ticket in tickets] == [planned.object_id for planned in objects]
        assert [ticket.num_bytes for ticket in tickets] == [OBJECT] * 3
        store_many(made, 20, lambda: None)
        assert made.reasons(objects) == [""] * 3
        made.tier.release(tickets)
        store_many(made, 20, lambda: None, "later")
        assert not any(made.path(planned).exists() for planned in objects)


def offered(made: TierPair, objects: list[PlannedObject]) -> list[bool]:
    """As a lookup of this prompt finds them."""
    keys = [planned.object_id.key for planned in objects]
    hits = made.tier.hits(GEOMETRY, keys, len(keys) * GEOMETRY.match_unit + 1)
    return [hits.has(planned.object_id) for planned in objects]


def test_what_is_dropped_is_stored_anew_in_another_file_while_a_load_holds_the_old_one(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        objects = chain("p", 2)
        made.store(objects)
        tickets = made.tier.acquire(objects)
        made.tier.drop(objects[0].object_id)
        before = [made.path(planned) for planned in objects]
        made.store(objects[:1])
        made.settled()
        after = [made.path(planned) for planned in objects]
        assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, True]
        assert held_files(made.tier) == {ticket.part.file for ticket in tickets}
        made.tier.release(tickets)
        assert held_files(made.tier) == frozenset()
        until(lambda: object_files(made.root) == sorted(after), "the old file's end")
        assert made.reasons(objects) == [""] * 3
        made.settled()
        assert made.tier.usage().used_bytes == bytes_under(made.root) == counted(made.root)[0]


def test_late_news_of_a_file_does_not_bring_it_back_once_its_object_was_stored_anew(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        (first,) = chain("p", 1)[:1]
        made.store([first])
        before = made.settled().file(first)
        made.tier.drop(first.object_id)
        made.store([first])
        now = made.file(first)
        tell(made.tier, Found((first,), (before,)))
        made.tier.advance()
        assert made.file(first) == now != before


def test_a_dropped_chunk_hides_what_lies_on_top_until_it_is_stored_anew(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        objects = chain("p", 4)
        made.store(objects)
        assert offered(made, objects) == [True] * 5
        made.tier.drop(objects[1].object_id)
        assert offered(made, objects) == [True, False, False, False, False]
        assert offered(made, chain("q", 1)) == [False] * 2
        assert [made.tier.has_or_awaits(planned.object_id) for planned in objects] == [True, False, True, True, True]
        made.store(objects[1:2])
        assert offered(made, objects) == [True] * 5
        assert made.reasons(objects) == [""] * 5


def test_what_is_dropped_before_it_was_stored_takes_what_lies_on_top_with_it(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        first, second, _ = chain("p", 2)
        made.store(chain("q", 1))
        made.settled()
        tickets = [made.write(planned) for planned in (first, second)]
        made.tier.drop(first.object_id)
        for ticket in tickets:
            made.tier.commit(ticket)
        made.settled()
        assert made.coverage([first, second]) == [False, False]
        until(lambda: len(object_files(made.root)) == 2, "the end of their files")


def test_stores_that_end_together_end_each_as_if_alone(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        whole = chain("p", 2)
        made.store(whole)
        made.tier.drop(whole[0].object_id)
        (lost,) = chain("r", 1)[:1]
        parent, child, snapshot = chain("q", 2)
        outdated = made.write(lost)
        anew = made.write(whole[0])
        built = [made.write(planned) for planned in (parent, child, snapshot)]
        made.tier.abort(outdated)
        made.tier.commit_all([outdated, built[2], built[1], anew, built[0]])  # not parents first
        made.settled()
        assert made.coverage([lost]) == [False]
        assert offered(made, whole) == offered(made, [parent, child, snapshot]) == [True] * 3
        assert made.reasons([*whole, parent, child, snapshot]) == [""] * 6
        until(lambda: len(object_files(made.root)) == 6, "the end of the others' files")
        made.settled()
        assert made.tier.usage().used_bytes == bytes_under(made.root) == counted(made.root)[0]


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Somebody else writes to the catalogue, and does not end."""
    with contextlib.closing(sqlite3.connect(path_of(str(root), newest(str(root))), isolation_level=None)) as held:
        held.execute("BEGIN IMMEDIATE")
        yield


def test_no_call_of_the_scheduler_waits_for_the_disk(tmp_path):
    with tier_pair(tmp_path / "root", capacity_bytes=12 * on_disk()) as made:
        objects = chain("p", 5)
        made.store(objects)
        made.settled()
        with locked(made.root):  # as a process that was stopped holds it
            tickets = made.tier.acquire(objects)
            assert tickets is not None
            made.tier.release(tickets)
            made.tier.drop(objects[4].object_id)
            made.tier.suspend(objects[3].object_id)
            reserved = [made.tier.reserve(chain(name, 1)[0]) for name in "abcdefgh"]
            for ticket in filter(None, reserved[::2]):
                made.tier.commit(ticket.ticket)
            for ticket in filter(None, reserved[1::2]):
                made.tier.abort(ticket.ticket)
            made.tier.advance()
            made.tier.usage()
        made.store(objects[3:5])
        assert made.reasons(objects) == [""] * 6


def test_usage_counts_whole_files_of_all_ranks(tmp_path):
    with tier_pair(tmp_path / "root", world_size=2) as made:
        made.store(chain("p", 2))
        usage = made.tier.usage()
        assert usage.num_objects == 3
        assert usage.used_bytes == 6 * on_disk() == bytes_under(made.root)
        until(lambda: counted(made.root)[0] == usage.used_bytes)


def test_what_could_not_be_read_and_has_gone_is_offered_once_it_is_stored_anew(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        objects = chain("p", 1)
        for planned in objects:
            made.tier.suspend(planned.object_id)  # another engine has evicted it before that was known
        made.store(objects)
        assert offered(made, objects) == [True, True]
