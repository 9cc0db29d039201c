# SPDX-License-Identifier: Apache-2.0
"""The index half: which objects it takes, and what loads, drops and reports do to them."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.disk.files import bytes_under, counted, object_files, on_disk
from tests.tiers.disk.inside import delay_following
from tests.tiers.disk.objects import OBJECT, chain
from tests.tiers.disk.tier_pair import store_many, tier_pair
from tests.waiting import until
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.catalogue.generations import newest, path_of


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


def test_a_child_without_its_parent_is_not_reserved(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
        assert made.tier.reserve(chain("q", 2)[1]) is None


def test_what_a_load_holds_is_not_evicted(tmp_path):
    with tier_pair(tmp_path / "root", capacity_bytes=12 * on_disk(), eviction_policy="lru") as made:
        objects = chain("p", 2)
        made.store(objects)
        tickets = made.tier.acquire(objects)
        assert [ticket.object_id for ticket in tickets] == [planned.object_id for planned in objects]
        assert [ticket.num_bytes for ticket in tickets] == [OBJECT] * 3
        store_many(made, 20, lambda: None)
        assert made.reasons(objects) == [""] * 3
        made.tier.release([planned.object_id for planned in objects])
        store_many(made, 20, lambda: None, "later")
        assert not any(made.path(planned).exists() for planned in objects)


def test_what_is_dropped_cannot_be_acquired_and_goes(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        objects = chain("p", 2)
        made.store(objects)
        assert made.tier.acquire(objects) is not None
        made.tier.drop(objects[0].object_id)
        assert made.tier.acquire(objects) is None
        assert made.tier.reserve(objects[0]) is None  # a load holds its name
        made.tier.release([planned.object_id for planned in objects])
        until(lambda: object_files(made.root) == [])
        made.store(objects)


def test_a_dropped_chunk_takes_what_lies_on_top_with_it(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        objects = chain("p", 4)
        made.store(objects)
        made.tier.drop(objects[1].object_id)
        assert made.coverage(objects) == [True, False, False, False, False]
        until(lambda: object_files(made.root) == [made.path(objects[0])])
        made.store(objects[1:])
        assert made.reasons(objects) == [""] * 5


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
            made.tier.release([planned.object_id for planned in objects])
            made.tier.drop(objects[4].object_id)
            assert made.tier.reserve(objects[4]) is None  # its old file is yet to be unlinked
            reserved = [made.tier.reserve(chain(name, 1)[0]) for name in "abcdefgh"]
            for ticket in filter(None, reserved[::2]):
                made.tier.commit(ticket.ticket)
            for ticket in filter(None, reserved[1::2]):
                made.tier.abort(ticket.ticket)
            made.tier.advance()
            made.tier.usage()
            assert made.path(objects[4]).exists()
        made.store(objects[4:])
        assert made.reasons(objects) == [""] * 6


def test_a_dropped_name_is_stored_again_only_once_its_removal_has_been_told(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        objects = chain("p", 3)
        made.store(objects)
        made.settled()
        with delay_following(made.tier):
            made.tier.drop(objects[1].object_id)
            until(lambda: not made.path(objects[1]).exists(), "the removal")
            made.turned()
            made.tier.advance()
            assert made.tier.reserve(objects[1]) is None  # the new one would be forgotten with the old
        made.store(objects[1:])
        assert made.coverage(objects) == [True] * 4


def test_usage_counts_whole_files_of_all_ranks(tmp_path):
    with tier_pair(tmp_path / "root", world_size=2) as made:
        made.store(chain("p", 2))
        usage = made.tier.usage()
        assert usage.num_objects == 3
        assert usage.used_bytes == 6 * on_disk() == bytes_under(made.root)
        until(lambda: counted(made.root)[0] == usage.used_bytes)
