# SPDX-License-Identifier: Apache-2.0
"""What a restart finds, after a close, a kill or the loss of the catalogue, and what it removes."""

import contextlib
import errno
import os
import re
import shutil
import threading
import time
from pathlib import Path

import msgspec
import pytest
from vllm_overlay.tiers.disk.files.listing import FoundObject, parents_first

from tests.tiers.disk.files import (
    bytes_under,
    counted,
    let_age,
    lose_catalogue,
    make_as_large_as_possible,
    object_files,
    on_disk,
    temporaries,
)  # fmt: skip
from tests.tiers.disk.inside import room_bytes
from tests.tiers.disk.objects import chain, conversations
from tests.tiers.disk.processes import WRITER, kill, start
from tests.tiers.disk.tier_pair import OTHER_NAMESPACE, tier_pair
from tests.waiting import until
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk.files.checksum import Seal
from vllm_overlay.tiers.disk.files.device import Device, temporary_name
from vllm_overlay.tiers.disk.files.format import MAX_PAYLOAD_BYTES, FormatError, ObjectHeader


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_restart_finds_the_same_coverage(tmp_path, world_size, is_lost):
    prompts = [chain(name, length) for name, length in (("p", 5), ("q", 1), ("r", 9))]
    with tier_pair(tmp_path / "root", world_size=world_size) as made:
        for objects in prompts:
            made.store(objects)
        used = made.tier.usage().used_bytes
    if is_lost:
        lose_catalogue(made.root)
    with tier_pair(tmp_path / "root", world_size=world_size) as again:
        again.recovered()
        for objects in prompts:
            assert again.coverage(objects) == [True] * len(objects)
            assert again.reasons(objects, rank=world_size - 1) == [""] * len(objects)
        assert again.tier.usage().used_bytes == used
        again.store(chain("s", 2))


def test_a_rebuild_works_while_the_tier_serves(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 600))
    lose_catalogue(made.root)
    with tier_pair(tmp_path / "root") as again:
        again.store(chain("q", 3))
        again.recovered()
        assert all(again.coverage(chain("p", 600)) + again.coverage(chain("q", 3)))


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_missing_middle_chunk_discards_what_lies_on_top(tmp_path, is_lost):
    objects = chain("p", 5)
    with tier_pair(tmp_path / "root") as made:
        made.store(objects)
    made.path(objects[2]).unlink()
    if is_lost:
        lose_catalogue(made.root)
    let_age(made.root)
    with tier_pair(tmp_path / "root") as again:
        again.recovered()
        if not is_lost:  # nobody looks before somebody wants it
            assert again.reasons(objects) == ["", "", "missing", "", "", ""]
            again.tier.drop(objects[2].object_id)
        assert again.coverage(objects) == [True, True, False, False, False, False]
        until(lambda: len(object_files(again.root)) == 2)
        until(lambda: counted(again.root)[0] == 2 * on_disk())


def test_an_object_without_one_ranks_file_is_not_there(tmp_path):
    objects = chain("p", 2)
    with tier_pair(tmp_path / "root", world_size=2) as made:
        made.store(objects)
    made.path(objects[1], 1).unlink()
    lose_catalogue(made.root)
    let_age(made.root)
    with tier_pair(tmp_path / "root", world_size=2) as again:
        again.recovered()
        assert again.coverage(objects) == [True, False, False]
        until(lambda: object_files(again.root) == sorted([again.path(objects[0], 0), again.path(objects[0], 1)]))


@pytest.mark.parametrize("damage", ["header", "short", "swapped", "symlink", "empty"])
def test_a_rebuild_does_not_take_a_damaged_file(tmp_path, damage):
    objects = chain("p", 3)
    with tier_pair(tmp_path / "root") as made:
        made.store(objects)
    path = made.path(objects[2])
    if damage == "header":
        with open(path, "r+b") as file:
            file.seek(30)
            file.write(b"\xff")
    elif damage == "swapped":
        shutil.copy(made.path(objects[1]), path)
    elif damage == "symlink":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.truncate(path, 0 if damage == "empty" else 8192)
    lose_catalogue(made.root)
    let_age(made.root)
    with tier_pair(tmp_path / "root") as again:
        again.recovered()
        assert again.coverage(objects) == [True, True, False, False]
        until(lambda: not os.path.lexists(path))


def test_a_file_in_a_wrong_place_goes_and_the_object_in_the_right_one_stays(tmp_path):
    objects = chain("p", 1)
    with tier_pair(tmp_path / "root") as made:
        made.store(objects)
    right = made.path(objects[0])
    elsewhere = right.parent.parent / ("00" if right.parent.name != "00" else "01")
    wrong = [elsewhere / right.name, right.with_name(right.name.replace(".r0", ".r1"))]
    for path in wrong:
        path.parent.mkdir(exist_ok=True)
        shutil.copy(right, path)
    let_age(made.root)
    with tier_pair(tmp_path / "root") as again:
        again.recovered()
        assert again.coverage(objects) == [True, True]
        until(lambda: not any(path.exists() for path in wrong))
        assert again.reasons(objects) == ["", ""]


class Refusing(Device):
    """One file cannot be opened."""

    def __init__(self, path: Path, error: Exception) -> None:
        self._path = str(path)
        self.error: Exception | None = error

    def open(self, path: str, flags: int) -> int:
        if path == self._path and self.error is not None:
            raise self.error
        return super().open(path, flags)


def test_what_builds_on_an_object_that_could_not_be_read_now_stays_for_the_next_start(tmp_path):
    objects = chain("p", 5)
    with tier_pair(tmp_path / "root") as made:
        made.store(objects)
    lose_catalogue(made.root)
    let_age(made.root)
    shortage = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with tier_pair(tmp_path / "root", device=Refusing(made.path(objects[2]), shortage)) as short:
        short.recovered()
        assert short.coverage(objects) == [True, True, False, False, False, False]
    assert len(object_files(made.root)) == 6
    with tier_pair(tmp_path / "root") as again:
        until(lambda: again.tier.advance() or all(again.coverage(objects)))


def test_what_builds_on_a_directory_that_could_not_be_listed_now_stays_for_the_next_start(tmp_path, monkeypatch):
    objects = chain("p", 5)
    with tier_pair(tmp_path / "root") as made:
        made.store(objects)
    lose_catalogue(made.root)
    let_age(made.root)
    scandir, unlisted = os.scandir, str(made.path(objects[2]).parent)

    def short(path: str):
        if path == unlisted and threading.current_thread().name.startswith("disk-recovery"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return scandir(path)

    monkeypatch.setattr("os.scandir", short)
    with tier_pair(tmp_path / "root") as scanned:
        scanned.recovered()
        assert not all(scanned.coverage(objects))
    monkeypatch.undo()
    assert len(object_files(made.root)) == 6
    with tier_pair(tmp_path / "root") as again:
        until(lambda: again.tier.advance() or all(again.coverage(objects)))


def test_a_scan_that_fails_removes_nothing_and_is_tried_again(tmp_path, said):
    objects = chain("p", 5)
    with tier_pair(tmp_path / "root") as made:
        made.store(objects)
    lose_catalogue(made.root)
    let_age(made.root)
    device = Refusing(made.path(objects[2]), RuntimeError("nobody has thought of this"))
    with tier_pair(tmp_path / "root", device=device) as failed:
        until(lambda: said("nobody has thought of this"), "a word of it")
        assert len(failed.tier.index) == 0
        assert len(object_files(made.root)) == 6
        device.error = None
        assert all(failed.recovered().coverage(objects))


def test_an_idle_engine_steps_until_what_was_there_is_known(tmp_path, monkeypatch):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 3))
        made.settled()
        assert not made.tier.has_more_to_come()
    with tier_pair(tmp_path / "root") as again:
        assert again.tier.has_more_to_come()
        until(lambda: again.tier.advance() or not again.tier.has_more_to_come())
        assert all(again.coverage(chain("p", 3)))
    monkeypatch.setattr("vllm_overlay.tiers.disk.manager._AWAKE_S", 0.0)
    with tier_pair(tmp_path / "root") as slow:
        assert slow.tier.is_recovering
        assert not slow.tier.has_more_to_come()


def test_files_of_no_object_are_left_alone(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 1))
    stranger = made.path(chain("p", 1)[0]).parent / "notes.txt"
    stranger.write_text("mine")
    with tier_pair(tmp_path / "root") as again:
        again.recovered()
        assert again.coverage(chain("p", 1)) == [True, True]
    assert stranger.exists()


def test_parents_come_first_and_else_the_oldest():
    def found(name, parents, mtime):
        ids = tuple(ObjectId("f0", parent.encode()) for parent in parents)
        return FoundObject(PlannedObject(ObjectId("f0", name.encode()), ids, 0, 64, 1), mtime, ())

    items = [
        found("d", "bc", 1), found("b", "a", 3), found("c", "a", 4), found("a", "", 5), found("z", "", 2),
        found("x", "y", 0), found("y", "x", 0), found("o", "gone", 0), found("u", "xa", 0),
    ]  # fmt: skip
    reachable, unreachable = parents_first(items)
    names = "".join(item.planned.object_id.key.decode() for item in reachable)
    assert sorted(names) == sorted("abcdz")
    assert names.index("a") < min(names.index("b"), names.index("c"))
    assert names[-2:] == "dz"
    assert sorted(item.planned.object_id.key for item in unreachable) == [b"o", b"u", b"x", b"y"]


@pytest.mark.parametrize("turn", range(3))
def test_after_kill_9_no_bad_object_is_found_and_no_temporary_stays(tmp_path, turn):
    root = tmp_path / "root"
    writer = start(WRITER, root, "w")
    until(lambda: len(object_files(root)) > 5 + 20 * turn)
    kill(writer)
    directory = object_files(root)[0].parent
    name = temporary_name().replace(f".{os.getpid()}.", f".{writer.pid}.")
    (directory / name).write_bytes(b"half an object")  # as a writer killed between two writes leaves it
    with tier_pair(root) as again:
        again.recovered()
        until(lambda: temporaries(root) == [])
        until(lambda: again.tier.advance() or counted(root)[0] == bytes_under(root))
        again.settled()
        for turn in range(1000):
            objects = chain(f"w-{turn}", 3)
            held = [planned for planned in objects if again.has(planned)]
            assert held == objects[: len(held)]
            assert again.reasons(held) == [""] * len(held)
            if not held:
                break
        assert turn > 0


def test_a_temporary_stays_while_its_writer_lives_or_where_nobody_can_say_until_it_is_old(tmp_path):
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 1))
        directory = object_files(root)[0].parent
        own, own_old = (directory / temporary_name() for _ in range(2))
        theirs, theirs_old = (directory / re.sub(r"[0-9a-f]{8}", "0" * 8, temporary_name(), count=1) for _ in range(2))
        for path in (own, own_old, theirs, theirs_old):
            path.write_bytes(b"on its way")
        for path in (own_old, theirs_old):
            os.utime(path, (time.time() - 7200,) * 2)
        with tier_pair(root) as other:  # not alone
            other.store(chain("q", 1))
            until(lambda: temporaries(root) == sorted([own, own_old, theirs]))
    with tier_pair(root) as alone:
        alone.store(chain("r", 1))
        until(lambda: temporaries(root) == sorted([own, own_old]))


@pytest.mark.parametrize("lost", ["capacity", "free space"])
@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_a_restart_with_a_little_less_room_loses_a_little(tmp_path, lost, is_rebuilt):
    prompts = conversations(count=40, shared=300, own=2)
    every = {item.object_id: item for prompt in prompts for item in prompt}
    capacity, less = 2 * len(every) * on_disk(), len(every) * on_disk() * 95 // 100
    with tier_pair(tmp_path / "root", capacity_bytes=capacity) as made:
        for prompt in prompts:
            made.store([item for item in prompt if not made.tier.has_or_awaits(item.object_id)])
    if is_rebuilt:
        lose_catalogue(made.root)
    changes = {"capacity_bytes": less} if lost == "capacity" else {"device": LittleFree(tmp_path / "root", less)}
    with tier_pair(tmp_path / "root", **changes) as again:
        again.recovered()
        until(lambda: again.tier.advance() or room_bytes(again.tier) > 0, "room")
        again.settled()
        served = [prompt for prompt in prompts if all(again.coverage(prompt))]
        assert 0 < again.tier.usage().evicted_objects < 0.2 * len(every)
        assert len(served) > 0.5 * len(prompts)
        assert again.reasons(served[0]) == [""] * len(served[0])


class LittleFree(Device):
    """A file system on which others' files have left ``num_bytes`` to the root."""

    def __init__(self, root: Path, num_bytes: int) -> None:
        self._root, self._num_bytes = root, num_bytes

    def free_bytes(self, path: str) -> int:
        return self._num_bytes - bytes_under(self._root)


def theirs(directory: Path) -> Path:
    """A temporary of another host."""
    return directory / re.sub(r"[0-9a-f]{8}", "0" * 8, temporary_name(), count=1)


def test_a_time_far_in_the_future_is_no_reason_to_keep_a_temporary(tmp_path):
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 1))
        directory = object_files(root)[0].parent
        own, writing, *left = directory / temporary_name(), theirs(directory), theirs(directory), theirs(root)
        for path in (own, writing, *left):
            path.write_bytes(b"half an object")
        for path in (own, *left):
            os.utime(path, (time.time() + 1e8,) * 2)
        os.utime(writing, (time.time() + 600,) * 2)  # the clock of its host is ahead
        with tier_pair(root) as other:  # not alone
            other.store(chain("q", 1))
            until(lambda: temporaries(root) == sorted([own, writing]))


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_time_far_in_the_future_is_no_reason_to_keep_what_belongs_to_no_object(tmp_path, is_alone):
    objects = chain("p", 5)
    with tier_pair(tmp_path / "root") as made:
        made.store(objects)
    made.path(objects[1]).unlink()
    lose_catalogue(made.root)
    unreachable = [made.path(planned) for planned in objects[2:]]
    for path in unreachable[1:]:
        os.utime(path, (time.time() + 1e8,) * 2)
    os.utime(unreachable[0], (time.time() + 600,) * 2)
    with contextlib.ExitStack() as others:
        if not is_alone:
            others.enter_context(tier_pair(made.root, namespace=OTHER_NAMESPACE)).recovered()
        with tier_pair(made.root) as again:
            again.recovered()
            until(lambda: not any(path.exists() for path in unreachable[1:]))
            assert unreachable[0].exists()  # it may be on its way
            assert again.reasons(objects[:1]) == [""]


# Sizes.


def test_files_of_impossible_sizes_hinder_nobody(tmp_path):
    """As sparse as they are, they would be more bytes than any capacity, and than the catalogue can say."""
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 2))
    directory = made.path(chain("p", 2)[0]).parent
    huge = [directory / "a", directory / f"{directory.name}.f0.r0"]
    for path in huge:
        make_as_large_as_possible(path)
        os.utime(path, (1e9,) * 2)
    lose_catalogue(root)
    with tier_pair(root, capacity_bytes=20 * on_disk()) as again:
        again.store(chain("q", 1))
        again.recovered()
        assert again.reasons([*chain("p", 2), *chain("q", 1)]) == [""] * 5
        until(lambda: not huge[1].exists())  # it has an object's name and is none
        until(lambda: counted(root)[0] == 5 * on_disk())
    assert huge[0].exists()


def test_a_header_that_says_an_impossible_size_is_none():
    planned = PlannedObject(ObjectId("f0", b"key"), (), 0, 64, MAX_PAYLOAD_BYTES + 1)
    header = ObjectHeader(bytes(32), planned.object_id, (), 0, 64, planned.num_bytes, 0, 1, 1, Seal(bytes(16)))
    with pytest.raises(FormatError):
        header.encode()
    assert ObjectHeader.decode(msgspec.structs.replace(header, payload_bytes=MAX_PAYLOAD_BYTES).encode())


@pytest.mark.parametrize("forged", [{"end_tokens": 2**50}, {"parents": (chain("p", 2)[0].object_id,) * 2}])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_header_that_no_row_can_hold_keeps_nothing_else_from_being_recovered(tmp_path, forged, is_lost):
    """Whoever may write under a root without a key can make one."""
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 2))
        until(lambda: counted(made.root)[0] == 3 * on_disk())
    donor = made.path(chain("p", 2)[1])
    hostile = donor.parents[1] / "00" / f"{bytes(32).hex()}.f0.r0"
    hostile.parent.mkdir(exist_ok=True)
    header = ObjectHeader.decode(donor.read_bytes()[:4096])
    changed = msgspec.structs.replace(header, object_id=ObjectId("f0", bytes(32)), **forged)
    hostile.write_bytes(page_of(changed) + donor.read_bytes()[4096:])
    os.utime(hostile, (time.time() - 60,) * 2)
    if is_lost:
        lose_catalogue(made.root)
    with tier_pair(tmp_path / "root") as again:
        until(lambda: again.tier.advance() or again.coverage(chain("p", 2)) == [True] * 3)
        again.store(chain("q", 1))
        until(lambda: not hostile.exists())


def page_of(header: ObjectHeader) -> bytes:
    """As ``encode`` would write it if it looked at no field."""
    checks = ObjectHeader._check_ranges
    ObjectHeader._check_ranges = lambda self, max_payload_bytes: None
    try:
        return header.encode()
    finally:
        ObjectHeader._check_ranges = checks
