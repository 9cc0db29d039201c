# SPDX-License-Identifier: Apache-2.0
"""Opening: which files are believed, what replaces one that is not, forks, and bounded waits."""

import multiprocessing
import os
import resource
import signal
import sqlite3
import stat
from pathlib import Path

import pytest

from tests.tiers.disk.catalogue.check import check
from tests.tiers.disk.catalogue.objects import CHUNKS, MIB, NOW, loaded, member, numbers, store, stored
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.catalogue import Busy, Catalogue, Damaged, Superseded, Unavailable, replace_damaged
from vllm_overlay.tiers.disk.catalogue.generations import path_of


def test_everything_is_private(tmp_path: Path) -> None:
    root = tmp_path / "root"
    catalogue = member(root)
    store(catalogue, stored(1))
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    catalogue.close()


def test_what_was_stored_is_there_after_everybody_closed(tmp_path: Path) -> None:
    catalogue = member(tmp_path)
    store(catalogue, stored(1), stored(2, (1,)))
    catalogue.leave()
    catalogue.close()
    assert numbers(loaded(Catalogue(str(tmp_path)))) == [1, 2]


def test_nothing_is_granted_until_a_first_rebuild_is_complete(tmp_path: Path) -> None:
    catalogue = Catalogue(str(tmp_path))
    catalogue.join([CHUNKS], NOW)
    assert catalogue.grant(8192, 8192, MIB).num_bytes == 0
    assert catalogue.begin_rebuild()
    assert catalogue.grant(8192, 8192, MIB).num_bytes == 0
    catalogue.end_rebuild()
    assert catalogue.grant(8192, 8192, MIB).num_bytes == 8192
    catalogue.close()


def change(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


@pytest.mark.parametrize("kind", ["link", "directory", "empty", "text", "foreign", "later", "more", "other", "view"])
def test_a_file_that_is_no_catalogue_is_damaged_and_replaced(tmp_path: Path, kind: str) -> None:
    path = Path(path_of(str(tmp_path), 1))
    if kind in ("later", "more", "other", "view"):
        Catalogue(str(tmp_path)).close()
        change(
            path,
            {
                "later": "PRAGMA user_version = 2",
                "more": "CREATE TRIGGER t AFTER INSERT ON object BEGIN DELETE FROM object; END",
                "other": "ALTER TABLE member RENAME COLUMN granted TO given",
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


def test_a_root_or_members_that_are_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="root"):
        Catalogue(str(tmp_path / "link"))
    (tmp_path / "real" / "members").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="members"):
        Catalogue(str(tmp_path / "real"))


def test_who_has_the_old_one_open_is_told(tmp_path: Path) -> None:
    old = member(tmp_path)
    store(old, stored(1))
    replace_damaged(str(tmp_path), old.generation)
    replace_damaged(str(tmp_path), old.generation)
    with pytest.raises(Superseded):
        old.totals()
    new = member(tmp_path)
    assert new.generation == 2 and new.slot != old.slot
    replace_damaged(str(tmp_path), old.generation)
    assert new.totals().num_objects == 0, "who comes late replaces nothing"
    old.close()
    new.close()


def test_an_old_generation_stays_while_anybody_has_it_open(tmp_path: Path) -> None:
    first = Catalogue(str(tmp_path))
    replace_damaged(str(tmp_path), 1)
    second = Catalogue(str(tmp_path))
    replace_damaged(str(tmp_path), 2)
    second.close()
    Catalogue(str(tmp_path)).close()
    assert os.path.exists(path_of(str(tmp_path), 1)) and os.path.exists(path_of(str(tmp_path), 2))
    with pytest.raises(Superseded):
        first.totals()
    first.close()
    Catalogue(str(tmp_path)).close()
    assert sorted(path.name for path in tmp_path.glob("catalogue-*.sqlite*")) == ["catalogue-3.sqlite"]


def test_a_root_that_was_removed_or_replaced_is_noticed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    catalogue = member(root)
    root.rename(tmp_path / "away")
    with pytest.raises(Superseded):
        catalogue.totals()
    Catalogue(str(root)).close()
    with pytest.raises(Superseded):
        catalogue.totals()
    catalogue.close()


def test_a_half_made_catalogue_of_a_killed_process_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "catalogue-new").write_bytes(b"half")
    (tmp_path / "catalogue-new-wal").write_bytes(b"half")
    catalogue = Catalogue(str(tmp_path))
    assert check(catalogue) == []
    catalogue.close()


def test_a_wait_is_bounded_and_says_for_whom(tmp_path: Path) -> None:
    catalogue = member(tmp_path, timeout_s=0.05)
    holder = sqlite3.connect(path_of(str(tmp_path), 1), isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(Busy, match="process"):
        catalogue.grant(1, 1, MIB)
    assert catalogue.totals().num_objects == 0, "who only reads waits for no writer"
    holder.execute("ROLLBACK")
    catalogue.grant(1, 1, MIB)
    holder.close()
    catalogue.close()


def hold(root: str, has_begun: "multiprocessing.connection.Connection") -> None:
    db = sqlite3.connect(path_of(root, 1), isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    has_begun.send(os.getpid())
    has_begun.recv()


def test_another_process_that_holds_it_is_named(tmp_path: Path) -> None:
    catalogue = member(tmp_path, timeout_s=0.05)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(str(tmp_path), theirs))
    process.start()
    try:
        pid = ours.recv()
        with pytest.raises(Busy, match=f"process {pid}"):
            catalogue.give_back(1)
    finally:
        process.kill()
        process.join()
    catalogue.close()


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
    catalogue = member(tmp_path)
    assert "process" in in_child(catalogue)
    store(catalogue, stored(1))
    other = Catalogue(str(tmp_path))
    assert other.dead_members() == [], "the child's close let the parent's slot go"
    assert check(other) == [] and numbers(loaded(other)) == [1]
    catalogue.close()
    other.close()


def test_a_child_does_not_keep_its_parents_slot(tmp_path: Path) -> None:
    catalogue = member(tmp_path)
    ours, theirs = multiprocessing.Pipe()
    if not (pid := os.fork()):
        theirs.send("running")
        theirs.recv()
        os._exit(0)
    try:
        ours.recv()
        catalogue.close()
        other = Catalogue(str(tmp_path))
        assert [dead.slot for dead in other.dead_members()] == [0]
        other.close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_write_that_fails_is_no_damage_and_changes_nothing(tmp_path: Path) -> None:
    catalogue = member(tmp_path)
    store(catalogue, stored(1))
    size = max(path.stat().st_size for path in tmp_path.glob("catalogue-1.sqlite*"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(Unavailable):
            store(catalogue, *map(stored, range(2, 250)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert numbers(loaded(catalogue)) == [1] and check(catalogue) == []
    store(catalogue, *map(stored, range(300, 400)))
    catalogue.close()


def test_a_root_that_cannot_be_opened_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        Catalogue(str(tmp_path / "missing" / "root"))
