# SPDX-License-Identifier: Apache-2.0
"""What a start takes for a root."""

import errno
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.disk.devices import FailingDevice
from tests.tiers.disk.foreign import KINDS, forget_marker, make_foreign, state_of
from tests.tiers.disk.roots import WRITER, assert_marked, opened
from tests.waiting import PATIENCE_S
from vllm_overlay import versions
from vllm_overlay.config import ConfigError
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.marker import MARKER, NotARootError, encode_marker
from vllm_overlay.tiers.disk.files.recognition import require_root
from vllm_overlay.tiers.disk.files.root import is_in_place, takes_direct_io


@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_is_no_root_is_refused_and_nothing_in_it_changes(tmp_path, kind):
    directory = make_foreign(tmp_path / "theirs", kind)
    before = state_of(directory)
    with pytest.raises(ConfigError, match=f"root='{re.escape(str(directory))}' .*empty directory.*theirs/vllm-kv"):
        opened(directory)
    assert state_of(directory) == before


def test_the_refusal_names_what_it_found_without_harm_to_the_log(tmp_path):
    (tmp_path / "\x1b[2Jbell\n").write_text("")
    (tmp_path / ("n" * 255)).write_text("")
    with pytest.raises(ConfigError) as refusal:
        opened(tmp_path)
    assert "bell" in str(refusal.value)
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 500 + len(str(tmp_path))


def test_a_new_root_and_an_empty_one_get_a_marker_and_nothing_else(tmp_path):
    (tmp_path / "mount" / "lost+found").mkdir(parents=True)
    for root in (tmp_path / "a" / "new", tmp_path / "mount", tmp_path / os.fsdecode(b"caf\xe9")):
        opened(root)
        assert_marked(root)
        before = (root / MARKER).stat().st_mtime_ns
        opened(root)
        assert (root / MARKER).stat().st_mtime_ns == before
        assert {path.name for path in root.iterdir()} <= {MARKER, "lost+found"}
    assert stat.S_IMODE((tmp_path / "a" / "new").stat().st_mode) == 0o700
    said = json.loads((tmp_path / "mount" / MARKER).read_text())
    assert (said["version"], said["written_by"], said["journal"]) == (versions.DISK_ROOT, versions.PACKAGE, "wal")


def test_a_marker_of_no_bytes_is_what_a_killed_start_left(tmp_path):
    (tmp_path / MARKER).touch()
    with pytest.raises(NotARootError, match="no server has used it"):
        require_root(str(tmp_path))
    opened(tmp_path)
    assert_marked(tmp_path)
    require_root(str(tmp_path))


@pytest.fixture
def lost_marker(tmp_path: Path) -> Path:
    """A root that a server has used, whose marker somebody has removed."""
    root = tmp_path / "root"
    opened(root)
    (root / WRITER / "17").mkdir(parents=True)
    for name in (f"{WRITER}/alive", f"{WRITER}/17/69701.r0", "catalogue-1.sqlite", "catalogue.lock", "weights.json"):
        (root / name).touch()
    (root / "host-node-7").mkdir()
    forget_marker(root)
    return root


def test_a_root_that_lost_its_marker_is_recognised(lost_marker):
    require_root(str(lost_marker))
    before = set(lost_marker.rglob("*"))
    opened(lost_marker)
    assert_marked(lost_marker)
    assert set(lost_marker.rglob("*")) == before | {lost_marker / MARKER}


@pytest.mark.parametrize("directory", [WRITER, "host-node-7"])
def test_a_root_that_lost_all_its_files_is_recognised(lost_marker, directory):
    """As ``find ROOT -type f -delete`` leaves it."""
    for path in [*lost_marker.rglob("*")]:
        if path.is_file():
            path.unlink()
    for other in {WRITER, "host-node-7"} - {directory}:
        shutil.rmtree(lost_marker / other)
    opened(lost_marker)
    assert_marked(lost_marker)


UNLINKED = (".nfs00000000012c4d8b0000002f", ".fuse_hidden0000001700000003")
"""Real names of files that somebody has open: as an NFS client and libfuse gave them."""


@pytest.mark.parametrize("name", UNLINKED)
def test_what_a_cleaner_leaves_where_removed_files_stay_until_they_are_closed_is_a_root(lost_marker, name):
    for path in [*lost_marker.rglob("*")]:
        if path.is_file():
            path.unlink() if path.suffix == ".r0" else path.rename(path.with_name(name))
    opened(lost_marker)
    assert_marked(lost_marker)
    assert (lost_marker / name).exists() and (lost_marker / WRITER / name).exists()


@pytest.mark.parametrize("name", UNLINKED)
def test_such_a_name_alone_is_no_root_that_was_used_and_says_nothing_of_a_strangers(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(NotARootError, match="no server has used it"):
        require_root(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="empty directory"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "name", ["notes.txt", f"{WRITER}/notes.txt", "host-", ".nfs_x", ".tmp.0a1b2c3d.12.34.5", "members/0"]
)
def test_a_stranger_in_a_root_without_marker_is_too_much(lost_marker, name):
    (lost_marker / name).parent.mkdir(exist_ok=True)
    (lost_marker / name).write_text("somebody's")
    with pytest.raises(ConfigError, match="empty directory"):
        opened(lost_marker)
    assert not (lost_marker / MARKER).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 4096, b"x" * 100_000, b'{"version": 1}'])
def test_a_damaged_marker_of_a_root_is_written_anew(lost_marker, content):
    (lost_marker / MARKER).write_bytes(content)
    opened(lost_marker)
    assert_marked(lost_marker)


def test_a_marker_that_others_may_write_says_nothing(tmp_path):
    directory = make_foreign(tmp_path / "theirs", "project")
    (directory / MARKER).write_bytes(encode_marker("wal"))
    (directory / MARKER).chmod(0o666)
    with pytest.raises(ConfigError, match="empty directory"):
        opened(directory)
    (directory / MARKER).chmod(0o600)
    opened(directory)


def test_a_marker_of_a_later_format_is_refused_with_the_version_that_wrote_it(tmp_path):
    root = tmp_path / "root"
    opened(root)
    later = {**json.loads(encode_marker("wal")), "version": versions.DISK_ROOT + 1, "written_by": "9.8.7"}
    for words in ({}, {"journal": "wal3", "new": [1]}):
        (root / MARKER).write_text(json.dumps({**later, **words}))
        before = state_of(root)
        with pytest.raises(ConfigError, match=r"root=.* vllm-overlay 9\.8\.7 .*format 2"):
            opened(root)
        assert state_of(root) == before


def test_two_that_start_on_an_empty_directory_at_once_both_work(tmp_path):
    both = threading.Barrier(2)

    class Meeting(Device):
        """Each waits for the other before it writes its marker, and after."""

        def pwritev(self, fd, segments, offset):
            both.wait(PATIENCE_S)
            done = super().pwritev(fd, segments, offset)
            both.wait(PATIENCE_S)
            return done

    failures = []

    def start():
        try:
            assert is_in_place(opened(tmp_path / "root", device=Meeting()))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert_marked(tmp_path / "root")
    assert [path.name for path in (tmp_path / "root").iterdir()] == [MARKER]


def test_what_another_makes_while_a_start_looks_is_no_strangers(tmp_path, monkeypatch):
    """The marker comes before all else, so a start reads it last."""
    root = tmp_path / "root"
    listdir = os.listdir

    def while_another_starts(path):
        if str(path) == str(root) and not (root / MARKER).exists():
            (root / MARKER).write_bytes(encode_marker("wal"))
            (root / MARKER).chmod(0o600)
            return ["of a later version"]
        return listdir(path)

    monkeypatch.setattr("os.listdir", while_another_starts)
    opened(root)


# Whose it is, and what it takes.


@pytest.mark.parametrize("mode", [0o770, 0o2770, 0o707])
def test_a_root_that_others_may_write_is_refused(tmp_path, mode):
    root = tmp_path / "root"
    opened(root)
    root.chmod(mode)
    with pytest.raises(
        ConfigError, match=rf"root=.* mode {mode:04o}, so others may write it: .*mode to 0700"
    ) as refusal:
        opened(root)
    assert f"set it to one below, such as '{root}/vllm-kv', which is made anew" in str(refusal.value)
    opened(root / "vllm-kv")


@pytest.fixture
def as_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory, and this process without root's rights."""
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    directory = Path("/tmp") / f"{os.getpid()}-{tmp_path_factory.getbasetemp().name}"
    directory.mkdir(mode=0o755)
    yield directory
    os.seteuid(0)
    shutil.rmtree(directory)


@pytest.mark.parametrize("mode", [0o755, 0o700])  # 0700: of an earlier container
def test_a_root_of_another_user_is_refused_with_both_users(as_nobody, mode):
    os.chmod(as_nobody, mode)
    os.seteuid(65534)
    with pytest.raises(ConfigError, match=r"root=.* belongs to user 0: run the server as that user \(.* user 65534"):
        opened(as_nobody)


def test_a_root_that_cannot_be_written_is_refused(as_nobody):
    os.chown(as_nobody, 65534, 65534)
    as_nobody.chmod(0o500)
    os.seteuid(65534)
    with pytest.raises(ConfigError, match=r"root=.* is not writable"):
        opened(as_nobody)
    with pytest.raises(ConfigError, match=r"root=.* cannot be created"):
        opened(as_nobody / "below")


def test_a_root_whose_mode_lets_nobody_write_is_refused(tmp_path):
    opened(tmp_path / "root")
    (tmp_path / "root").chmod(0o500)
    with pytest.raises(ConfigError, match=r"root=.* is not writable.* mode 0700"):
        opened(tmp_path / "root")


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "root").write_text("")
    with pytest.raises(ConfigError, match=r"root=.* is not a directory"):
        opened(tmp_path / "root")
    with pytest.raises(ConfigError, match=r"root=.* cannot be created"):
        opened(tmp_path / "root" / "below")


def test_a_root_without_file_locks_is_refused(tmp_path, monkeypatch):
    def flock(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ConfigError, match=r"root=.* without file locks"):
        opened(tmp_path / "root")


def test_a_file_system_without_direct_io_is_told_once(tmp_path, caplog):
    caplog.set_level("INFO")
    root = opened(tmp_path / "root")
    assert not takes_direct_io(FailingDevice(open=errno.EINVAL), root)
    assert [record.getMessage() for record in caplog.records if "no O_DIRECT" in record.getMessage()]
    takes_direct_io(Device(), root)
    assert [path.name for path in (tmp_path / "root").iterdir()] == [MARKER]
