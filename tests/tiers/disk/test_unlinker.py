# SPDX-License-Identifier: Apache-2.0
"""Files to unlink: several at a time, each once; what cannot be unlinked now keeps its bytes, and nothing else goes for
it."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiers.disk.devices import FailingDevice, RuledDevice, SmallDevice, is_object
from tests.tiers.disk.files import bytes_under, counted, object_files, on_disk
from tests.tiers.disk.inside import num_turns, stores_in_flight_bytes
from tests.tiers.disk.objects import chain
from tests.tiers.disk.oracle import problems
from tests.tiers.disk.roots import seat_in
from tests.tiers.disk.tier_pair import NAMESPACE, store_many, tier_pair
from tests.waiting import PATIENCE_S, until
from vllm_overlay.tiers.disk.catalogue import Catalogue, File, Garbage, Namespace
from vllm_overlay.tiers.disk.evictor import Evictor, Unlinker
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.writer import FILES_A_DIRECTORY, path_of
from vllm_overlay.tiers.disk.messages import ServedNamespace
from vllm_overlay.tiers.disk.room import Room

WRITER = "1" * 16
NUM_OBJECTS = 8


@pytest.fixture
def garbage(tmp_path) -> list[Garbage]:
    """Files of two ranks that a catalogue wants to be unlinked."""
    found = [Garbage(File(WRITER, number), 2, 8192) for number in range(NUM_OBJECTS)]
    for item in found:
        for rank in range(2):
            path = Path(path_of(str(tmp_path), item.file, rank))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return found


def unlinker_of(root: Path, device: Device, garbage: list[Garbage]) -> tuple[Catalogue, Unlinker]:
    root.chmod(0o700)
    catalogue = Catalogue(str(root))
    catalogue.discard(garbage)
    catalogue.end_rebuild()
    catalogue.join(WRITER, Namespace("a" * 64))
    return catalogue, Unlinker(seat_in(root, catalogue, WRITER, device))


def on_unlink(act: Callable[[str], object]) -> Device:
    return RuledDevice(lambda call, path: call == "unlink" and act(path))


def test_a_file_system_that_keeps_one_unlink_waiting_does_not_keep_the_others(tmp_path, garbage):
    together = threading.Barrier(4)
    catalogue, unlinker = unlinker_of(tmp_path, on_unlink(lambda path: together.wait(PATIENCE_S)), garbage)
    unlinker.run()
    assert object_files(tmp_path) == []
    assert catalogue.totals().removing_bytes == 0


def test_a_file_that_cannot_be_unlinked_is_tried_again_and_keeps_its_bytes(tmp_path, garbage):
    def stuck(path: str) -> None:
        if path.endswith("/3.r1"):
            raise OSError(errno.EIO, "a bad sector")

    device = on_unlink(stuck)
    catalogue, unlinker = unlinker_of(tmp_path, device, garbage)
    unlinker.run()
    assert [path.name for path in object_files(tmp_path)] == ["3.r1"]
    assert (catalogue.totals().removing_bytes, unlinker.num_stuck) == (8192, 1)
    device.before = lambda call, path: None
    unlinker.run()
    assert object_files(tmp_path) == []
    assert (catalogue.totals().removing_bytes, unlinker.num_stuck) == (0, 0)


def test_a_directory_goes_with_its_last_file(tmp_path, garbage):
    """A server that runs for months would leave one for every 4,096 objects that it has stored."""
    staying = Path(path_of(str(tmp_path), File(WRITER, FILES_A_DIRECTORY), 0))
    staying.parent.mkdir()
    staying.touch()
    _, unlinker = unlinker_of(tmp_path, Device(), [*garbage, Garbage(File(WRITER, FILES_A_DIRECTORY + 1), 2, 8192)])
    unlinker.run()
    assert list((tmp_path / WRITER).iterdir()) == [staying.parent]
    assert object_files(tmp_path) == [staying]


def test_a_file_that_is_gone_already_is_no_error_and_its_bytes_are_free_once(tmp_path, garbage):
    catalogue, unlinker = unlinker_of(tmp_path, Device(), garbage)
    for path in object_files(tmp_path)[:5]:
        path.unlink()
    assert unlinker.finish(garbage, 1 << 40, 1 << 40) == NUM_OBJECTS * 8192
    assert unlinker.finish(garbage, 1 << 40, 1 << 40) == 0  # as another one that had the same to unlink
    totals = catalogue.totals()
    assert (totals.granted_bytes, totals.removing_bytes) == (NUM_OBJECTS * 8192, 0)


def test_a_defect_in_a_thread_reaches_the_caller(tmp_path, garbage):
    def defect(path: str) -> None:
        raise IndexError("a defect")

    _, unlinker = unlinker_of(tmp_path, on_unlink(defect), garbage)
    with pytest.raises(IndexError, match="a defect"):
        unlinker.run()


def test_a_disk_that_stays_full_is_no_flood_in_the_log(tmp_path, garbage, caplog):
    device = SmallDevice(0)
    catalogue, unlinker = unlinker_of(tmp_path, device, garbage)
    evictor = Evictor(seat_in(tmp_path, catalogue, WRITER, device), unlinker, Room())
    for _ in range(3):
        assert evictor.unlink_ahead(ServedNamespace(NAMESPACE), 0) == 0
    assert caplog.text.count("is full") <= 1


# In a tier.


def test_while_nothing_can_be_unlinked_nothing_more_is_evicted(tmp_path):
    device = FailingDevice()
    with tier_pair(tmp_path / "root", device=device, capacity_bytes=40 * on_disk()) as made:
        store_many(made, 20, lambda: None)
        made.settled()
        before = made.tier.usage().evicted_objects
        device.faults["unlink"] = errno.EIO
        for turn in range(60):
            done = num_turns(made.tier)
            made.try_store(chain(f"more-{turn}", 1)[0])
            until(lambda done=done: num_turns(made.tier) > done, "a turn of the bookkeeper")
        assert 0 < made.tier.usage().evicted_objects - before < 12
        device.faults.clear()
        made.store(chain("p", 1))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_bytes_of_a_store_that_was_given_up_stay_taken_until_its_file_is_gone(tmp_path, is_replaced):
    """Also where the catalogue is replaced meanwhile."""
    device = FailingDevice()
    with tier_pair(tmp_path / "root", device=device) as made:
        made.store(chain("q", 1))
        (chunk, _) = chain("p", 1)
        ticket = made.write(chunk)
        device.faults["unlink"] = errno.EIO
        made.tier.abort(ticket)
        made.settled()
        assert (len(object_files(made.root)), stores_in_flight_bytes(made.tier)) == (3, on_disk())
        if is_replaced:
            (made.root / "catalogue-1.sqlite").unlink()
            until(lambda: counted(made.root)[0] > 0, "the next catalogue")
        device.faults.clear()
        until(lambda: stores_in_flight_bytes(made.tier) == 0, "room")
        assert is_replaced or len(object_files(made.root)) == 2
        until(lambda: made.has(chunk) or made.try_store(chunk) == "", "the object")  # a rebuild may have found the file
        assert made.reasons([chunk]) == [""]
    assert problems(made.root) == []


def test_one_file_that_can_never_be_unlinked_does_not_stop_the_stores(tmp_path):
    stuck: list[str] = []

    def keep_the_first(path: str) -> None:
        if is_object(path):
            stuck[:] = stuck or [path]
            if path == stuck[0]:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with tier_pair(tmp_path / "root", device=on_unlink(keep_the_first), capacity_bytes=40 * on_disk()) as made:
        store_many(made, 40, lambda: None)
        assert stuck
        assert bytes_under(made.root) <= 40 * on_disk()
        assert made.has(chain("many-39", 2)[2])
