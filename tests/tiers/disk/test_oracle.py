# SPDX-License-Identifier: Apache-2.0
"""The oracle sees what is wrong with a root, whatever that is."""

import contextlib
import sqlite3
from pathlib import Path

import pytest

from tests.tiers.disk.files import bytes_under
from tests.tiers.disk.inside import room_bytes
from tests.tiers.disk.objects import chain
from tests.tiers.disk.oracle import problems
from tests.tiers.disk.tier_pair import tier_pair
from tests.waiting import until
from vllm_overlay.tiers.disk.catalogue import generations
from vllm_overlay.tiers.disk.files.writer import path_of

PROMPT = chain("p", 3)


@pytest.fixture
def made(tmp_path):
    """A root that nobody uses any more."""
    with tier_pair(tmp_path / "root", world_size=2) as made:
        made.recovered().store(PROMPT)
        made.settled()
    assert problems(made.root) == []
    return made


def test_a_file_that_changed_is_wrong(made):
    path = made.path(PROMPT[1], 1)
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    assert [f"{path} has other bytes than were written"] == problems(made.root)


def test_another_objects_file_is_wrong(made):
    made.path(PROMPT[1]).write_bytes(made.path(PROMPT[2]).read_bytes())
    (sentence,) = problems(made.root)
    assert "is of another object" in sentence


def test_a_row_without_a_file_is_wrong(made):
    made.path(PROMPT[1]).unlink()
    (sentence,) = problems(made.root)
    assert "No such file" in sentence


def test_another_file_of_the_same_object_is_wrong(made):
    elsewhere = made.path(PROMPT[1]).with_name("99.r0")
    elsewhere.write_bytes(made.path(PROMPT[1]).read_bytes())
    assert problems(made.root) == [f"{elsewhere} has no row"]


def test_a_file_without_a_row_is_wrong_once_nobody_lives_who_may_be_writing_it(made):
    with tier_pair(made.root, world_size=2) as serving:
        serving.recovered()
        until(lambda: room_bytes(serving.tier) > 0, "room")
        ticket = serving.tier.reserve(chain("another", 1)[0])
        path = Path(path_of(str(made.root), ticket.part.file, 0))
        path.parent.mkdir()
        path.write_bytes(b"half a file")
        assert problems(made.root) == []
    assert problems(made.root) == [f"{path} has no row"]


def test_a_file_in_a_wrong_place_is_wrong(made):
    path = made.path(PROMPT[1]).parent.parent / "7" / "1.r0"
    path.parent.mkdir()
    path.write_bytes(b"half a file")
    assert problems(made.root) == [f"{path} has no row"]


def test_counters_that_are_no_sums_are_wrong(made):
    with contextlib.closing(sqlite3.connect(generations.path_of(str(made.root), 1))) as db, db:
        db.execute("UPDATE meta SET num_bytes = num_bytes + 1")
    (sentence,) = problems(made.root)
    assert "counted" in sentence


def test_more_bytes_than_may_be_are_wrong(made):
    num_bytes = bytes_under(made.root)
    assert problems(made.root, num_bytes) == []
    assert problems(made.root, num_bytes - 1) == [f"{num_bytes} bytes are there, and {num_bytes - 1} may be"]
