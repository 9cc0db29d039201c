# SPDX-License-Identifier: Apache-2.0
"""What a restart finds, after a close, a kill or the loss of the catalogue."""

import contextlib
import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.tiers.disk.catalogue.inside import find
from tests.tiers.disk.devices import FailingDevice, GatedDevice, RuledDevice
from tests.tiers.disk.files import (
    bytes_under,
    counted,
    lose_catalogue,
    make_as_large_as_possible,
    object_files,
    on_disk,
)
from tests.tiers.disk.inside import catalogue_of, has_buried
from tests.tiers.disk.objects import chain, conversations
from tests.tiers.disk.oracle import problems
from tests.tiers.disk.prompts import KEYS, objects_of
from tests.tiers.disk.tier_pair import NAMESPACE, TierPair, close_tier, tier_pair
from tests.waiting import until
from vllm_overlay.planner.objects import ObjectId, PlannedObject
from vllm_overlay.tiers.disk import manager
from vllm_overlay.tiers.disk.catalogue import File, StoredObject, replace_damaged
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.format import HEADER_BYTES, ObjectHeader
from vllm_overlay.tiers.disk.recovery import rebuild, recovery
from vllm_overlay.tiers.disk.recovery.rebuild import Found, parents_first


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(recovery, "PAUSE_S", 0.3)


def row_file(made: TierPair, planned: PlannedObject) -> File | None:
    """Where the catalogue has an object."""
    stored_id = made.namespace.stored_id(planned.object_id)
    found = find(catalogue_of(made.tier), made.namespace.fingerprint, [stored_id])
    return found[0].file if found else None


# What is found.


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


def test_objects_of_all_kinds_are_found_whichever_was_written_first(tmp_path):
    """A window's chunk depends on the chunk of full attention that ends with it."""
    whole = objects_of(KEYS, [320, 640])
    with tier_pair(tmp_path / "root") as made:
        made.store(whole)
    for age, planned in enumerate(whole):
        os.utime(made.path(planned), (1e9 - age,) * 2)
    lose_catalogue(made.root)
    with tier_pair(made.root) as again:
        again.recovered()
        assert again.coverage(whole) == [True] * len(whole)


def test_a_rebuild_works_while_the_tier_serves(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 600))
    lose_catalogue(made.root)
    with tier_pair(tmp_path / "root") as again:
        again.store(chain("q", 3))
        again.recovered()
        assert all(again.coverage(chain("p", 600)) + again.coverage(chain("q", 3)))


def test_an_idle_engine_steps_until_what_was_there_is_known(tmp_path, monkeypatch):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 3))
        made.settled()
        assert not made.tier.has_more_to_come()
    with tier_pair(tmp_path / "root") as again:
        assert again.tier.has_more_to_come()
        until(lambda: again.tier.advance() or not again.tier.has_more_to_come())
        assert all(again.coverage(chain("p", 3)))
    now = 0.0
    monkeypatch.setattr(manager, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now))
    with tier_pair(tmp_path / "root") as slow:
        now += 2 * manager._AWAKE_S  # the engine takes long until it can step
        assert slow.tier.is_recovering
        assert slow.tier.has_more_to_come()
        now += manager._AWAKE_S
        assert not slow.tier.has_more_to_come()


def test_each_step_takes_in_news_also_if_its_thread_loses_its_core(tmp_path, monkeypatch):
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 300))
    clock = itertools.count()  # a second more at each look
    monkeypatch.setattr(manager, "time", SimpleNamespace(monotonic=clock.__next__, perf_counter=clock.__next__))
    with tier_pair(tmp_path / "root") as again:
        again.recovered()
        assert all(again.coverage(chain("p", 300)))


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
        until(lambda: again.tier.advance() or sum(counted(again.root)) <= less, "a root that is small enough")
        again.settled()
        until(lambda: counted(again.root)[0] == bytes_under(again.root))
        assert bytes_under(again.root) >= 0.94 * len(every) * on_disk()
        served = [prompt for prompt in prompts if all(again.coverage(prompt))]
        assert len(served) > 0.5 * len(prompts)
        assert again.reasons(served[0]) == [""] * len(served[0])


class LittleFree(Device):
    """A file system on which others' files have left ``num_bytes`` to the root."""

    def __init__(self, root: Path, num_bytes: int) -> None:
        self._root, self._num_bytes = root, num_bytes

    def free_bytes(self, path: str) -> int:
        return self._num_bytes - bytes_under(self._root)


# What is not whole.


def test_an_object_without_one_ranks_file_is_not_there(tmp_path):
    objects = chain("p", 2)
    with tier_pair(tmp_path / "root", world_size=2) as made:
        made.store(objects)
    made.path(objects[1], 1).unlink()
    lose_catalogue(made.root)
    with tier_pair(tmp_path / "root", world_size=2) as again:
        again.recovered()
        assert again.coverage(objects) == [True, False, False]
        until(lambda: object_files(again.root) == [again.path(objects[0], 0), again.path(objects[0], 1)])


@pytest.mark.parametrize("damage", ["missing", "header", "short", "swapped", "symlink", "empty", "huge"])
def test_a_rebuild_takes_neither_a_damaged_file_nor_what_builds_on_it(tmp_path, damage):
    objects = chain("p", 3)
    with tier_pair(tmp_path / "root") as made:
        made.store(objects)
    path = made.path(objects[2])
    if damage == "missing":
        path.unlink()
    elif damage == "header":
        with open(path, "r+b") as file:
            file.seek(30)
            file.write(b"\xff")
    elif damage == "swapped":
        shutil.copy(made.path(objects[1]), path)
    elif damage == "symlink":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "huge":  # as sparse as it is, it would be more bytes than the catalogue can say
        make_as_large_as_possible(path)
    else:
        os.truncate(path, 0 if damage == "empty" else 8192)
    lose_catalogue(made.root)
    with tier_pair(tmp_path / "root", capacity_bytes=20 * on_disk()) as again:
        again.recovered()
        assert again.coverage(objects) == [True, True, False, False]
        until(lambda: not os.path.lexists(path))
        again.store(chain("q", 1))
        until(lambda: counted(again.root)[0] == bytes_under(again.root) == 4 * on_disk())


@pytest.mark.parametrize("forged", [{"end_tokens": 2**50}, {"parents": (chain("p", 2)[0].object_id,) * 2}])
def test_a_header_that_no_row_can_hold_keeps_nothing_else_from_being_recovered(tmp_path, forged):
    """Whoever may write under a root without a key can make one."""
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 2))
    donor = made.path(chain("p", 2)[1])
    number = 1 << 20
    hostile = donor.parents[1] / str(number // 4096) / f"{number}.r0"
    hostile.parent.mkdir()
    header = ObjectHeader.decode(donor.read_bytes()[:HEADER_BYTES])
    changed = {"object_id": ObjectId("f0", bytes(32)), "file": File(header.file.writer, number), **forged}
    hostile.write_bytes(page_of(msgspec.structs.replace(header, **changed)) + donor.read_bytes()[HEADER_BYTES:])
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


def test_parents_come_first_and_else_the_oldest():
    def found(name, parents, written_at):
        ids = tuple(ObjectId("f0", parent.encode()) for parent in parents)
        planned = PlannedObject(ObjectId("f0", name.encode()), ids, 0, 64, 1)
        return Found(StoredObject("a" * 64, planned, File("0" * 16, 1), 1, 8192, 0), False, written_at)

    items = [
        found("d", "bc", 1), found("b", "a", 3), found("c", "a", 4), found("a", "", 5), found("z", "", 2),
        found("x", "y", 0), found("y", "x", 0), found("o", "gone", 0), found("u", "xa", 0),
    ]  # fmt: skip
    reachable, unreachable = parents_first(items)
    names = "".join(found.item.object_id.key.decode() for found in reachable)
    assert sorted(names) == sorted("abcdz")
    assert names.index("a") < min(names.index("b"), names.index("c"))
    assert names[-2:] == "dz"
    assert sorted(found.item.object_id.key for found in unreachable) == [b"o", b"u", b"x", b"y"]


# What cannot be read now.


@pytest.fixture
def lost(tmp_path) -> Path:
    """A root with a prompt and without a catalogue."""
    with tier_pair(tmp_path / "root") as made:
        made.store(chain("p", 5))
    lose_catalogue(made.root)
    return made.root


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE])
def test_what_cannot_be_read_now_is_waited_for_and_nothing_on_top_of_it_is_lost(lost, error, said):
    files = object_files(lost)
    device = FailingDevice()
    device.fail(files[2], error, "open" if error == errno.EMFILE else "preadv")
    with tier_pair(lost, device=device) as again:
        until(lambda: said("has to wait"), "a word of it")
        assert not has_buried(again.tier)
        assert again.try_store(chain("q", 1)[0]) == "no_room"
        assert object_files(lost) == files
        device.fail("nothing", error)
        assert all(again.recovered().coverage(chain("p", 5)))
        again.store(chain("q", 1))


def test_a_disk_on_which_little_can_be_read_loses_nothing_however_long_it_lasts(lost, monkeypatch, said):
    monkeypatch.setattr(rebuild, "GIVE_UP_S", 0.0)
    device = FailingDevice(preadv=errno.EIO)
    with tier_pair(lost, device=device) as again:
        until(lambda: len(said("has to wait")) > 2, "words of it")
        assert len(object_files(lost)) == 6
        device.faults.clear()
        assert all(again.recovered().coverage(chain("p", 5)))


@pytest.mark.parametrize("call", ["listdir", "scandir"])
def test_a_directory_that_cannot_be_listed_now_is_tried_again_and_nothing_is_granted(lost, monkeypatch, said, call):
    real, fails = getattr(os, call), [True]

    def short(path: str):
        if fails and threading.current_thread().name.startswith("disk-recovery"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path)

    monkeypatch.setattr(os, call, short)
    with tier_pair(lost) as again:
        until(lambda: said("has to wait"), "a word of it")
        assert again.turned().try_store(chain("q", 1)[0]) == "no_room"
        assert len(object_files(lost)) == 6
        fails.clear()
        assert all(again.recovered().coverage(chain("p", 5)))


@pytest.mark.parametrize("call", ["listdir", "scandir"])
def test_a_directory_that_can_never_be_listed_keeps_nothing_else_from_being_recovered(lost, monkeypatch, call):
    monkeypatch.setattr(rebuild, "GIVE_UP_S", 0.0)
    real, bad = getattr(os, call), lost / ("1" * 16)
    (bad / "0").mkdir(parents=True)

    def fail(path: str):
        if str(path).startswith(str(bad)):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path)

    monkeypatch.setattr(os, call, fail)
    with tier_pair(lost) as again:
        assert all(again.recovered().coverage(chain("p", 5)))
        again.store(chain("q", 1))
        monkeypatch.undo()


def test_a_directory_that_goes_while_it_is_looked_for_is_not_waited_for(lost, monkeypatch, said):
    """With its last file, which somebody else has evicted."""
    real, going = rebuild.directories_under, lost / ("1" * 16) / "0"
    going.mkdir(parents=True)

    def then_it_goes(root: str, writer: str):
        found = real(root, writer)
        if str(going) in found:
            going.rmdir()
        return found

    monkeypatch.setattr(rebuild, "directories_under", then_it_goes)
    with tier_pair(lost) as again:
        assert all(again.recovered().coverage(chain("p", 5)))
    assert not said("not recovered")


def test_a_directory_that_could_not_be_listed_once_is_looked_at_again_however_long_a_look_takes(tmp_path, monkeypatch):
    for name in ("p", "q"):
        with tier_pair(tmp_path / "root") as made:
            made.store(chain(name, 5))
    bad = str(made.path(chain("q", 5)[0]).parent)
    lose_catalogue(made.root)
    real, late_s = os.listdir, [0.0]

    def once(path: str):
        if str(path) == bad and not late_s[0]:
            late_s[0] = 2 * rebuild.GIVE_UP_S
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return real(path)

    monkeypatch.setattr(os, "listdir", once)
    monkeypatch.setattr(
        rebuild, "time", SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + late_s[0])
    )
    with tier_pair(made.root) as again:
        assert all(again.recovered().coverage([*chain("p", 5), *chain("q", 5)]))
    assert late_s[0]


def test_a_rebuild_that_fails_removes_nothing_and_is_tried_again(lost, said):
    def fail(call: str, path: str) -> None:
        if call == "open" and path == str(bad):
            raise RuntimeError("nobody has thought of this")

    bad, device = object_files(lost)[2], RuledDevice(fail)
    with tier_pair(lost, device=device) as failed:
        until(lambda: said("nobody has thought of this"), "a word of it")
        assert len(failed.tier.index) == 0
        assert len(object_files(lost)) == 6
        device.before = lambda call, path: None
        assert all(failed.recovered().coverage(chain("p", 5)))


# One object in several files, and files on their way.


@contextlib.contextmanager
def stored_twice(root: Path) -> Iterator[tuple[TierPair, TierPair, Path, Path]]:
    """An object that one engine has stored and another one anew. The first file is still there, and is garbage."""
    planned, device = chain("p", 1)[0], FailingDevice()
    with tier_pair(root) as one, tier_pair(root, device=device) as other:
        one.recovered()
        other.recovered()
        one.store([planned])
        until(lambda: other.tier.advance() or other.has(planned), "the object")
        first = other.path(planned)
        device.faults["unlink"] = errno.EIO
        other.tier.drop(planned.object_id)
        other.store_at_last(planned)
        other.settled()
        second = other.path(planned)
        assert first != second and first.exists() and second.exists()
        os.utime(first, (time.time() - 5,) * 2)
        yield one, other, first, second
        device.faults.clear()


def test_a_rebuild_takes_the_newest_file_and_all_others_are_garbage_also_those_of_the_living(tmp_path):
    planned = chain("p", 1)[0]
    with stored_twice(tmp_path / "root") as (one, other, first, second):
        old = catalogue_of(one.tier)
        replace_damaged(str(one.root), old.generation, "wal")
        until(lambda: counted(one.root)[0] >= on_disk(), "the next catalogue")
        other.device.faults.clear()
        until(lambda: not first.exists(), "the end of the old file, though its writer lives")
        until(lambda: is_served_from(one, planned, second) and is_served_from(other, planned, second))
        assert one.reasons([planned]) == other.reasons([planned]) == [""]
        until(lambda: counted(one.root)[0] == bytes_under(one.root) == on_disk(), "the end of its bytes")
        assert problems(one.root) == []


def is_served_from(made: TierPair, planned: PlannedObject, path: Path) -> bool:
    made.tier.advance()
    return made.has(planned) and made.path(planned) == path and path.parts[-3] == made.file(planned).writer


@pytest.mark.parametrize("is_first_newer", [False, True])
def test_of_two_whole_files_of_the_dead_the_newer_counts(tmp_path, is_first_newer):
    planned = chain("p", 1)[0]
    with stored_twice(tmp_path / "root") as (one, other, first, second):
        close_tier(one.tier)
        close_tier(other.tier)
        assert first.exists()
    if is_first_newer:
        os.utime(first, (time.time() + 5,) * 2)
    lose_catalogue(one.root)
    with tier_pair(one.root) as again:
        again.recovered()
        assert again.path(planned) == (first if is_first_newer else second)
        until(lambda: len(object_files(one.root)) == 1, "the end of the other")
        assert again.reasons([planned]) == [""]


def test_what_is_being_written_while_a_rebuild_reads_stays(tmp_path):
    planned, device = chain("p", 1)[0], GatedDevice("pwritev")
    with tier_pair(tmp_path / "root", device=device) as made, tier_pair(tmp_path / "root") as other:
        ticket = made.submit(made.with_room().tier.reserve(planned))
        device.await_call()
        old = catalogue_of(other.tier)
        replace_damaged(str(made.root), old.generation, "wal")
        until(lambda: counted(made.root) >= (0, on_disk()), "the next catalogue, which grants again")
        until(lambda: has_buried(other.tier), "a burial")
        device.gate.set()
        made.end_of_store()
        made.tier.commit(ticket.ticket)
        until(lambda: row_file(made.settled(), planned) is not None, "its row")
        until(lambda: other.tier.advance() or other.has(planned), "the object")
        assert other.reasons([planned]) == [""]
    assert problems(made.root) == []


def test_an_object_whose_store_is_given_up_while_a_rebuild_finds_it_is_counted_or_gone(tmp_path):
    planned = chain("p", 1)[0]
    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        made.store(chain("q", 1))
        ticket = made.write(planned)
        path = Path(made.path(planned))
        aborted = threading.Event()

        def give_up(call: str, where: str) -> None:
            if call == "close" and where == str(path) and not aborted.is_set():
                made.tier.abort(ticket)
                aborted.set()

        for catalogue in made.root.glob("catalogue-*"):
            catalogue.unlink()
        with tier_pair(made.root, device=RuledDevice(give_up)) as looking:
            looking.recovered()
            made.settled()
            until(lambda: counted(made.root)[0] == bytes_under(made.root) >= 2 * on_disk())
    assert problems(made.root) == []


def test_a_namespace_is_private_still_when_its_catalogue_was_lost(tmp_path):
    """So that what no engine will ever serve again goes first."""
    with tier_pair(tmp_path / "root") as made:
        made.tier.clear()
        made.store_at_last(chain("p", 1)[0])
        made.settled()
    lose_catalogue(made.root)
    with tier_pair(made.root) as again:
        again.recovered()
        usage = {each.fingerprint: each.is_private for each in catalogue_of(again.tier).usage()}
    assert usage.pop(NAMESPACE.fingerprint) is False
    assert list(usage.values()) == [True]
