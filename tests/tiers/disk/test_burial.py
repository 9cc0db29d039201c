# SPDX-License-Identifier: Apache-2.0
"""A writer is one life of one engine. What a dead one has left is looked after, once none of it can write any more."""

import errno
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from tests.tiers.disk.catalogue.inside import granted
from tests.tiers.disk.devices import FailingDevice, GatedDevice
from tests.tiers.disk.files import bytes_under, counted, object_files, on_disk, writers_of
from tests.tiers.disk.inside import catalogue_of, delay_bookkeeper, has_buried, room_bytes
from tests.tiers.disk.objects import chain, content, fill
from tests.tiers.disk.oracle import problems
from tests.tiers.disk.processes import WRITER, kill, start
from tests.tiers.disk.roots import seat_in
from tests.tiers.disk.tier_pair import NAMESPACE, TierPair, close_tier, tier_pair
from tests.waiting import until
from vllm_overlay.common.file_lock import is_held
from vllm_overlay.tiers.disk.catalogue import Catalogue, File, Limits, Namespace
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.format import ObjectHeader
from vllm_overlay.tiers.disk.files.object_file import seal, write_object
from vllm_overlay.tiers.disk.files.writer import (
    alive_path,
    begin_life,
    path_of,
    share_life,
    writers_under,
)
from vllm_overlay.tiers.disk.recovery import recovery
from vllm_overlay.tiers.memory import HostPool

DEAD, HEIR = "0123456789abcdef", "f" * 16
OF_NAMESPACE = Namespace(NAMESPACE.fingerprint)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(recovery, "PAUSE_S", 0.3)


def files_of(root: Path, writer: str) -> list[Path]:
    return [path for path in object_files(root) if path.parts[-3] == writer]


def put(root: Path, writer: str, number: int) -> Path:
    """A file of a writer, of which no catalogue knows."""
    path = Path(path_of(str(root), File(writer, number), 0))
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(bytes(8192))
    return path


# A life.


def test_each_life_has_a_name_of_its_own(tmp_path):
    lives = [begin_life(str(tmp_path), Device()) for _ in range(3)]
    lives[2].end()
    shutil.rmtree(tmp_path / lives[2].writer)  # as once nothing of it is left
    lives.append(begin_life(str(tmp_path), Device()))
    assert len({life.writer for life in lives}) == 4
    for life in lives:
        life.end()


def test_a_file_that_is_there_is_never_written_to_and_one_that_fails_is_removed(tmp_path):
    planned, path = chain("p", 1)[0], tmp_path / "0" / "7.r0"
    file = File(DEAD, 7)
    header = ObjectHeader(
        bytes.fromhex(NAMESPACE.fingerprint), planned.object_id, (), 0, 64, planned.num_bytes, 0, 1, file
    )
    pool = HostPool(3, 8192)
    buffer = pool.buffer((0, 1, 2), planned.num_bytes)
    header = header.sealed(seal(buffer))
    write_object(Device(), str(path), header, buffer, direct=False)
    before = path.read_bytes()
    fill(buffer, content(planned, 1))
    with pytest.raises(FileExistsError):
        write_object(Device(), str(path), header, buffer, direct=False)
    assert path.read_bytes() == before
    with pytest.raises(OSError, match="Input/output"):
        write_object(FailingDevice(pwritev=errno.EIO), str(path.with_name("8.r0")), header, buffer, direct=False)
    assert list(path.parent.iterdir()) == [path]


FORKED = """
import os, sys
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.writer import begin_life
life = begin_life(sys.argv[1], Device())
if os.fork():
    print("ready", flush=True)
sys.stdin.read()
"""


def test_a_writer_is_dead_when_its_process_is_though_a_child_lives_on(tmp_path):
    parent = start(FORKED, tmp_path)
    (writer,) = writers_under(str(tmp_path))
    assert is_held(alive_path(str(tmp_path), writer))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not is_held(alive_path(str(tmp_path), writer)), "the child to give the lock up")
    kill(parent)


def test_a_rank_makes_no_writer_alive_and_shares_none_that_is_being_buried(tmp_path):
    root = str(tmp_path)
    life = begin_life(root, Device())
    rank = share_life(root, life.writer)
    life.end()
    assert rank is not None and is_held(alive_path(root, life.writer))
    rank.end()
    assert not is_held(alive_path(root, life.writer))
    os.unlink(alive_path(root, life.writer))
    assert share_life(root, life.writer) is None
    assert not os.path.lexists(alive_path(root, life.writer))


def test_a_life_on_a_server_that_died_ends_once(tmp_path, monkeypatch):
    """Its descriptor's number is free though the call fails, and may be another file's by then."""
    life, close, closed = begin_life(str(tmp_path), Device()), os.close, []

    def fail(fd):
        if threading.current_thread() is not threading.main_thread():  # it has files of its own
            return close(fd)
        closed.append(fd)
        close(fd)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(os, "close", fail)
    for _ in range(2):
        life.end()
    monkeypatch.undo()
    assert len(closed) == 1
    assert not is_held(alive_path(str(tmp_path), life.writer))


# A burial.


def test_what_a_killed_engine_had_not_committed_goes_and_all_else_stays(tmp_path):
    root = tmp_path / "root"
    writer = start(WRITER, root, "w")
    until(lambda: counted(root)[0] > 20 * on_disk(), "objects that are committed")
    kill(writer)
    (dead,) = writers_under(str(root))
    left = put(root, dead, 1 << 30)  # as a rank leaves it that was killed between two writes
    with tier_pair(root) as made:
        made.recovered()
        until(lambda: has_buried(made.tier), "a burial")
        assert not left.exists()
        assert problems(root) == []
        held = [planned for turn in range(100) for planned in chain(f"w-{turn}", 3) if made.has(planned)]
        assert len(held) > 10
        assert made.reasons(held) == [""] * len(held)


def test_a_directory_without_a_row_is_buried_and_what_is_no_object_stays(tmp_path):
    """A power cut may lose rows. Names that are no writers' are nobody's."""
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 1))
    lost, mine = put(root, DEAD, 5), root / DEAD / "0" / "notes.txt"
    mine.write_text("mine")
    (root / ("1" * 16) / "0").mkdir(parents=True)
    with tier_pair(root) as again:
        again.recovered()
        until(lambda: has_buried(again.tier), "a burial")
        assert not lost.exists() and mine.exists()
        assert not (root / ("1" * 16)).exists()
        assert again.reasons(chain("p", 1)) == [""] * 2


def test_what_a_dead_engine_wanted_to_unlink_and_was_granted_is_its_heirs(tmp_path):
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 3))
        until(lambda: counted(root)[0] == 4 * on_disk())
        dying, life = Catalogue(str(root)), begin_life(str(root), Device())
        dying.join(life.writer, OF_NAMESPACE)
        dying.grant(life.writer, 5 * on_disk(), 1, 1 << 40)
        assert len(dying.evict(life.writer, Limits(1 << 40, 2), 1 << 38)) == 2
        dying.close()
        life.end()
        until(lambda: life.writer not in catalogue_of(made.tier).writers(), "a burial")
        until(lambda: counted(root) == (2 * on_disk(), room_bytes(made.tier)), "the end of its garbage")
        assert bytes_under(root) == 2 * on_disk()
        made.settled().store(chain("p", 3)[2:])
    assert problems(root) == []


RANK = """
import sys
from pathlib import Path
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, TierPair
from vllm_overlay.tiers.base import StoreTicket
from vllm_overlay.tiers.disk.catalogue import File
from vllm_overlay.tiers.disk.messages import DiskPart
made = TierPair(Path(sys.argv[1]))
made.tier.close()
print("ready", flush=True)
for number in range(1_000_000):
    planned = chain(f"rank {number}", 1)[0]
    ticket = StoreTicket(number, planned, DiskPart(File(sys.argv[2], (1 << 30) + number), NAMESPACE.fingerprint))
    assert made.why_not_written(ticket) == ""
"""


def test_a_rank_that_outlives_its_killed_engine_leaves_nothing_that_nobody_counts(tmp_path):
    root = tmp_path / "root"
    engine = start(WRITER, root, "w")
    (dead,) = writers_under(str(root))
    rank = start(RANK, root, dead)
    until(lambda: any(int(path.name[:-3]) > 1 << 30 for path in files_of(root, dead)), "the rank's second file")
    kill(engine)
    with tier_pair(root) as made:
        made.recovered()
        until(lambda: has_buried(made.tier), "a look at the dead")
        num_files = len(files_of(root, dead))
        until(lambda: len(files_of(root, dead)) > num_files + 20, "more of its files")
        assert os.path.lexists(alive_path(str(root), dead))
        assert dead in catalogue_of(made.tier).writers(), "its grant is what it writes into"
        assert rank.poll() is None
        kill(rank)
        until(lambda: dead not in catalogue_of(made.tier).writers(), "its burial")
        until(lambda: problems(root) == [], "a sound root")
        assert not any(int(path.name[:-3]) >= 1 << 30 for path in files_of(root, dead))


@pytest.fixture
def ended(tmp_path):
    """An engine that has ended, and a rank of it that has a ticket still and takes no part in its life yet."""
    made = TierPair(tmp_path / "root").with_room()
    ticket = made.tier.reserve(chain("p", 1)[0])
    made.tier.close()
    yield made, ticket
    made.close()


def test_a_rank_that_wakes_up_after_the_burial_drops_its_store(ended):
    late, ticket = ended
    with tier_pair(late.root) as made:
        made.recovered()
        until(lambda: not (late.root / ticket.part.file.writer).exists(), "a burial")
        assert late.why_not_written(ticket) == "io_error"
        assert object_files(late.root) == []
        assert not (late.root / ticket.part.file.writer).exists()


def test_a_rank_that_wakes_up_during_the_burial_drops_its_store(ended, monkeypatch):
    late, ticket = ended
    list_all, reasons = recovery.directories_under, []

    def directories_under(root, writer):
        found = list_all(root, writer)
        if writer == ticket.part.file.writer and not reasons:
            reasons.append(late.why_not_written(ticket))
        return found

    monkeypatch.setattr(recovery, "directories_under", directories_under)
    with tier_pair(late.root) as made:
        made.recovered()
        until(lambda: not (late.root / ticket.part.file.writer).exists(), "a burial")
    assert reasons == ["io_error"]
    assert problems(late.root) == []


def test_the_file_of_a_store_that_outlives_its_engine_is_looked_after(tmp_path):
    planned, device = chain("p", 1)[0], GatedDevice("pwritev")
    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        with tier_pair(made.root, device=device) as ending:
            ticket = ending.submit(ending.with_room().tier.reserve(planned))
            device.await_call()
            close_tier(ending.tier)
            until(lambda: len(catalogue_of(made.tier).writers()) == 2 and has_buried(made.tier))
            assert granted(catalogue_of(made.tier))[ticket.part.file.writer] == (None, on_disk())
            device.gate.set()
            ending.end_of_store()
        until(lambda: object_files(made.root) == [], "a burial")
        until(lambda: len(catalogue_of(made.tier).writers()) == 1, "the end of its grant")


def begin_burial(
    root: Path, is_complete: bool = True, device: Device | None = None
) -> tuple[Catalogue, recovery.Recovery]:
    """Of an heir that has joined a new catalogue."""
    root.chmod(0o700)
    catalogue = Catalogue(str(root))
    catalogue.join(HEIR, OF_NAMESPACE)
    if is_complete:
        catalogue.end_rebuild()
    seat = seat_in(root, catalogue, HEIR, device or Device())
    return catalogue, recovery.Recovery(seat, OF_NAMESPACE.fingerprint)


def test_what_an_engine_that_is_just_beginning_commits_meanwhile_is_not_taken_for_a_dead_ones(tmp_path, monkeypatch):
    """Its directory is there before its lock. What is listed before the rows are read, and is in none, is nobody's."""
    (tmp_path / DEAD / "0").mkdir(parents=True)
    catalogue, buried = begin_burial(tmp_path)
    numbers_of = catalogue.numbers_of

    def begins(writer):
        found = numbers_of(writer)
        put(tmp_path, writer, 1)
        Path(alive_path(str(tmp_path), writer)).touch()
        return found

    monkeypatch.setattr(catalogue, "numbers_of", begins)
    buried.bury_the_dead()
    assert len(files_of(tmp_path, DEAD)) == 1


def test_an_engine_that_has_begun_while_its_directory_was_listed_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / DEAD).mkdir()
    catalogue, buried = begin_burial(tmp_path)
    list_all = recovery.directories_under

    def directories_under(root, writer):
        put(tmp_path, writer, 1)  # what it has stored before it was listed, and commits at once
        Path(alive_path(str(tmp_path), writer)).touch()
        catalogue.join(writer, OF_NAMESPACE)
        return list_all(root, writer)

    monkeypatch.setattr(recovery, "directories_under", directories_under)
    buried.bury_the_dead()
    assert len(files_of(tmp_path, DEAD)) == 1
    assert catalogue.writers() == {DEAD, HEIR}


def test_a_directory_that_goes_while_it_is_listed_hinders_no_burial(tmp_path, monkeypatch):
    """With its last file, which somebody else has evicted."""
    path = put(tmp_path, DEAD, 1)
    catalogue, buried = begin_burial(tmp_path)
    list_all = recovery.directories_under
    monkeypatch.setattr(recovery, "directories_under", lambda *of: [str(tmp_path / DEAD / "7"), *list_all(*of)])
    buried.bury_the_dead()
    assert not path.exists()
    assert catalogue.writers() == {HEIR}


def test_nobody_is_buried_while_the_catalogue_does_not_know_all_files(tmp_path):
    path = put(tmp_path, DEAD, 1)
    catalogue, buried = begin_burial(tmp_path, is_complete=False)
    catalogue.join(DEAD, OF_NAMESPACE)
    assert not buried.bury_the_dead()
    assert path.exists()
    assert catalogue.writers() == {DEAD, HEIR}
    catalogue.end_rebuild()
    assert buried.bury_the_dead()
    assert not path.exists()
    assert catalogue.writers() == {HEIR}


def test_what_a_living_engine_has_yet_to_commit_is_nobody_elses_to_unlink(tmp_path):
    """Nor is its row, however late it joins a new catalogue."""
    with tier_pair(tmp_path / "root") as slow, tier_pair(tmp_path / "root") as made:
        slow.recovered()
        made.recovered()
        tickets = [slow.write(planned) for planned in chain("p", 3)]
        with delay_bookkeeper(slow.tier):
            for ticket in tickets:
                slow.tier.commit(ticket)
            for path in made.root.glob("catalogue-*"):
                path.unlink()
            until(lambda: counted(made.root)[0] >= 0, "the next")
            with tier_pair(made.root) as third:
                third.recovered()
                until(lambda: has_buried(third.tier) and has_buried(made.tier), "burials")
                assert len(object_files(made.root)) == 4
        until(lambda: slow.tier.advance() or counted(made.root)[0] == 4 * on_disk(), "its objects")
        assert slow.settled().reasons(chain("p", 3)) == [""] * 4
    assert writers_of(made.root) == [file.parts[-3] for file in object_files(made.root)[:1]]
    assert problems(made.root) == []


def test_a_listing_that_fails_is_tried_again_unlinks_nothing_and_keeps_no_other_burial_waiting(tmp_path, monkeypatch):
    root = tmp_path / "root"
    with tier_pair(root) as made:
        made.store(chain("p", 3))
    lost, other, listdir, fails = put(root, DEAD, 1), put(root, "e" * 16, 1), os.listdir, [True]

    def failing(path):
        if fails and threading.current_thread().name == "disk-recovery" and DEAD in str(path):
            fails.append(True)
            raise OSError(5, "an input/output error")
        return listdir(path)

    monkeypatch.setattr("os.listdir", failing)
    with tier_pair(root) as again:
        again.recovered()
        until(lambda: len(fails) > 2, "a listing that fails twice")
        until(lambda: has_buried(again.tier) and not other.exists(), "the burial of all others")
        assert len(object_files(root)) == 5
        fails.clear()
        until(lambda: not lost.exists(), "a burial")
        assert again.reasons(chain("p", 3)) == [""] * 4


def test_what_cannot_be_unlinked_now_stays_counted_and_is_tried_again(tmp_path):
    path, device = put(tmp_path, DEAD, 1), FailingDevice()
    catalogue, buried = begin_burial(tmp_path, device=device)
    catalogue.join(DEAD, OF_NAMESPACE)
    catalogue.grant(DEAD, 8192, 8192, 1 << 30)
    device.fail(path, errno.EIO, "unlink")
    for _ in range(2):
        buried.bury_the_dead()
        assert path.exists() and catalogue.totals().granted_bytes == 8192
    device.fail("nothing", errno.EIO)
    buried.bury_the_dead()
    assert not path.exists() and catalogue.totals().granted_bytes == 0
