# SPDX-License-Identifier: Apache-2.0
"""Opening: which files are believed, what replaces one that is not, forks, and bounded waits."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.inside import writing
from tests.tiers.disk.catalogue.objects import MIB, NOW, Engine, numbers, object_id
from tests.waiting import until
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.catalogue import (
    Busy,
    Catalogue,
    Damaged,
    Limits,
    Scored,
    Superseded,
    Unavailable,
    replace_damaged,
    schema,
)
from vllm_overlay.tiers.disk.catalogue.generations import path_of


def test_nothing_is_granted_until_a_first_rebuild_is_complete(tmp_path: Path) -> None:
    one = Engine(tmp_path, is_complete=False)
    assert one.grant(8192, 8192, MIB).num_bytes == 0
    one.catalogue.end_rebuild()
    assert one.grant(8192, 8192, MIB).num_bytes == 8192
    with pytest.raises(ValueError, match="ended"):
        one.catalogue.adopt([one.stored(5)])


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_a_path_may_be_any_bytes(tmp_path: Path, journal: str) -> None:
    one = Engine(tmp_path / os.fsdecode(b"a\xff b%41?#&"), journal=journal)
    one.store(one.stored(1))
    one.close()
    assert numbers(Engine(tmp_path / os.fsdecode(b"a\xff b%41?#&"), journal=journal).loaded()) == [1]


def change(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


@pytest.mark.parametrize(
    "kind", ["link", "directory", "empty", "text", "foreign", "later", "more", "less", "other", "view"]
)
def test_a_file_that_is_no_catalogue_is_damaged_and_replaced(tmp_path: Path, kind: str) -> None:
    path = Path(path_of(str(tmp_path), 1))
    if kind in ("later", "more", "less", "other", "view"):
        Catalogue(str(tmp_path)).close()
        change(
            path,
            {
                "later": f"PRAGMA user_version = {schema.VERSION + 1}",
                "more": "CREATE TRIGGER t AFTER INSERT ON object BEGIN DELETE FROM object; END",
                "less": "DROP TRIGGER went",
                "other": "ALTER TABLE writer RENAME COLUMN granted TO given",
                "view": "CREATE VIEW v AS SELECT * FROM object",
            }[kind],
        )
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "directory":
        path.mkdir()
    elif kind == "foreign":
        change(path, "CREATE TABLE bookmarks (url TEXT)")
    else:
        path.write_bytes(b"" if kind == "empty" else b"no database " * 1000)
    with pytest.raises(Damaged) as damaged:
        Catalogue(str(tmp_path))
    assert damaged.value.generation == 1
    replace_damaged(str(tmp_path), damaged.value.generation)
    catalogue = Catalogue(str(tmp_path))
    assert catalogue.generation == 2 and check(catalogue) == []
    catalogue.close()


def test_a_header_that_nobody_may_write_is_damage_and_no_fault_of_the_file_system(tmp_path: Path) -> None:
    Engine(tmp_path).close()
    with open(path_of(str(tmp_path), 1), "r+b") as file:
        file.seek(18)  # the write version of SQLite's file format: what is not known may only be read
        file.write(b"\3")
    with pytest.raises(Damaged, match="nobody may write it"):
        Engine(tmp_path)


def test_another_users_file_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Catalogue(str(tmp_path)).close()
    found = os.lstat

    def of_another_user(path: str) -> os.stat_result:
        result = list(found(path))
        result[stat.ST_UID] += str(path).endswith(".sqlite")
        return os.stat_result(result)

    monkeypatch.setattr(os, "lstat", of_another_user)
    with pytest.raises(Damaged, match="another user"):
        Catalogue(str(tmp_path))


def test_a_root_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").touch()
    with pytest.raises(ConfigError, match="root"):
        Catalogue(str(tmp_path / "root"))


def test_a_root_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """The directory below may be another disk's mount point."""
    with pytest.raises(Unavailable):
        Catalogue(str(tmp_path / "root"))
    assert not (tmp_path / "root").exists()


def test_who_has_the_old_one_open_is_told(tmp_path: Path) -> None:
    old = Engine(tmp_path)
    old.store(old.stored(1))
    generation = old.catalogue.generation
    replace_damaged(str(tmp_path), generation)
    replace_damaged(str(tmp_path), generation)
    assert [path.name for path in tmp_path.glob("catalogue-*")] == ["catalogue-2.sqlite"]
    with pytest.raises(Superseded):
        old.catalogue.totals()
    new = Engine(tmp_path)
    assert new.catalogue.generation == 2
    replace_damaged(str(tmp_path), generation)
    assert new.catalogue.totals().num_objects == 0, "who comes late replaces nothing"


def test_what_a_killed_process_left_of_an_old_generation_goes_at_the_next_start(tmp_path: Path) -> None:
    Engine(tmp_path).close()
    (tmp_path / "catalogue-3.sqlite").write_bytes((tmp_path / "catalogue-1.sqlite").read_bytes())
    Engine(tmp_path).close()
    assert [path.name for path in tmp_path.glob("catalogue-*.sqlite")] == ["catalogue-3.sqlite"]


def test_a_root_that_was_removed_or_replaced_is_noticed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    one = Engine(root)
    root.rename(tmp_path / "away")
    with pytest.raises(Superseded):
        one.catalogue.totals()
    Engine(root).close()
    with pytest.raises(Superseded):
        one.catalogue.totals()


def test_a_half_made_catalogue_of_a_killed_process_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "catalogue-new").write_bytes(b"half")
    (tmp_path / "catalogue-new-wal").write_bytes(b"half")
    catalogue = Catalogue(str(tmp_path))
    assert check(catalogue) == []
    catalogue.close()


# Waits for others.


def test_a_wait_is_bounded_and_says_for_whom(tmp_path: Path) -> None:
    one = Engine(tmp_path, timeout_s=0.05)
    holder = sqlite3.connect(path_of(str(tmp_path), 1), isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(Busy, match="process"):
        one.grant(1, 1, MIB)
    assert one.catalogue.totals().num_objects == 0, "who only reads waits for no writer"
    holder.execute("ROLLBACK")
    one.grant(1, 1, MIB)
    holder.close()


def hold(root: str, begin: str, has_begun: "multiprocessing.connection.Connection") -> None:
    db = sqlite3.connect(path_of(root, 1), isolation_level=None)
    db.execute(begin)
    db.execute("SELECT * FROM meta").fetchone()
    has_begun.send(os.getpid())
    has_begun.recv()


@contextlib.contextmanager
def held_by_another(root: Path, begin: str) -> Iterator[int]:
    """A process that does not end its transaction, and is stopped."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(str(root), begin, theirs))
    process.start()
    try:
        pid = ours.recv()
        os.kill(pid, signal.SIGSTOP)
        yield pid
    finally:
        process.kill()
        process.join()


def test_another_process_that_holds_it_is_named(tmp_path: Path) -> None:
    one = Engine(tmp_path, timeout_s=0.05)
    with held_by_another(tmp_path, "BEGIN IMMEDIATE") as pid, pytest.raises(Busy, match=f"process {pid}"):
        one.catalogue.give_back(one.name, 1)


def test_a_process_that_is_stopped_while_it_reads_does_not_let_the_log_grow_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 256 << 10
    monkeypatch.setattr(schema, "MOST_LOG_BYTES", most)
    one = Engine(tmp_path, timeout_s=0.05)
    one.store(*map(one.stored, range(100)))
    log = Path(f"{path_of(str(tmp_path), 1)}-wal")
    with held_by_another(tmp_path, "BEGIN") as pid:
        with pytest.raises(Unavailable, match=f"process {pid} reads: continue or end it"):
            for turn in range(1000):
                one.catalogue.touch(one.namespace.fingerprint, map(object_id, range(100)), turn)
        assert most < log.stat().st_size < 2 * most
        assert one.catalogue.totals().num_objects == 100, "who only reads goes on"
    until(lambda: not is_refused(one))
    assert log.stat().st_size <= most and check(one.catalogue) == []


def is_refused(engine: Engine) -> bool:
    try:
        engine.touch(1, 2000)
    except Unavailable:
        return True
    return False


def in_child(catalogue: Catalogue) -> str:
    """What a use after a fork raises."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            catalogue.totals()
            os.write(writer, b"used")
        except ValueError as error:
            os.write(writer, str(error).encode())
        finally:
            catalogue.close()
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as said:
        return said.read()


def test_no_connection_crosses_a_fork(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    with writing(one.catalogue):
        assert "process" in in_child(one.catalogue)
        with pytest.raises(Busy):  # a child that closed the file would have dropped its parent's locks
            Engine(tmp_path, timeout_s=0.05)
    one.store(one.stored(1))
    assert check(one.catalogue) == []


def test_a_write_that_fails_is_no_damage_and_changes_nothing(tmp_path: Path) -> None:
    one = Engine(tmp_path)
    one.store(one.stored(1))
    one.grant(MIB * 100)
    one.catalogue.publish_scores(one.namespace.fingerprint, [Scored(object_id(1), 1.0, NOW)], NOW - 1)
    size = max(path.stat().st_size for path in tmp_path.glob("catalogue-1.sqlite*"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(Unavailable):
            one.commit(*map(one.stored, range(2, 250)))
        with pytest.raises(Unavailable):
            one.evict(Limits(1, 1), NOW)
        assert numbers(one.catalogue.choose_victims(Limits(1, 1), NOW)) == [1], "a full disk can be cleared"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert numbers(one.loaded()) == [1] and check(one.catalogue) == []
    one.commit(*map(one.stored, range(300, 400)))
    assert one.catalogue.totals().num_objects == 101


# A rollback journal, where the file system is not local.


WRITER = """
import sys
from pathlib import Path
from tests.tiers.disk.catalogue.objects import MIB, Engine
one = Engine(Path(sys.argv[1]), journal="delete")
one.grant(8 * MIB, 8 * MIB, 1024 * MIB)
for number in range(100):
    one.commit(one.stored(int(sys.argv[2]) + number))
    one.catalogue.totals()
one.close()
"""


def test_processes_share_a_catalogue_with_a_rollback_journal(tmp_path: Path) -> None:
    one = Engine(tmp_path, journal="delete")
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(1000 * turn)]) for turn in (1, 2, 3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert one.catalogue.totals().num_objects == 300
    assert check(one.catalogue) == []
    assert not list(tmp_path.glob("*-wal"))


def test_a_commit_of_another_engine_that_fails_has_not_cut_the_catalogue_short(tmp_path: Path) -> None:
    one = Engine(tmp_path, journal="delete", timeout_s=0.05)
    other = sqlite3.connect(path := path_of(str(tmp_path), 1), isolation_level=None)
    before = os.stat(path).st_size
    other.execute("PRAGMA cache_size = 10")
    other.execute("BEGIN IMMEDIATE")
    other.executemany("INSERT INTO garbage VALUES (1, ?, 1, 8192, NULL)", ((number,) for number in range(3000)))
    assert os.stat(path).st_size > before
    with pytest.raises(Busy):
        one.catalogue.totals()
    other.execute("ROLLBACK")
    other.close()
    assert one.catalogue.totals().removing_bytes == 0
    os.truncate(path, os.stat(path).st_size // 2)
    with pytest.raises(Damaged):
        one.catalogue.totals()


def test_a_catalogue_with_another_journal_than_its_root_is_made_anew(tmp_path: Path) -> None:
    Engine(tmp_path).close()
    with pytest.raises(Damaged, match="journal"):
        Engine(tmp_path, journal="delete")
    assert sqlite3.connect(path_of(str(tmp_path), 1)).execute("PRAGMA journal_mode").fetchone() == ("wal",)
    replace_damaged(str(tmp_path), 1, "delete")
    assert Engine(tmp_path, journal="delete").catalogue.generation == 2
