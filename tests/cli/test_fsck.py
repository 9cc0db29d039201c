# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay fsck``: what it finds, what it repairs, what it leaves alone."""

import errno
import os
import re
import shutil
import time

import pytest

from tests.cli.commands import contents, findings, forget_rows, path_of, run
from tests.cli.damage import damage
from tests.tiers.disk.files import object_files, on_disk
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, tier_pair
from vllm_overlay import cli
from vllm_overlay.tiers.disk.files.checksum import integrity_of
from vllm_overlay.tiers.disk.files.device import Device, temporary_name
from vllm_overlay.tiers.disk.files.learned_file import write_learned
from vllm_overlay.tiers.disk.maintenance import fsck
from vllm_overlay.tiers.policies.reuse import ReuseModel


def test_a_sound_root_has_status_0_and_is_not_touched(root, capsys):
    before = contents(root)
    status, report = run(capsys, "fsck", root)
    assert (status, report["findings"]) == (0, [])
    assert (report["num_objects"], report["num_files"], report["num_namespaces"]) == (8, 8, 4)
    assert report["num_bytes"] == 8 * on_disk()
    after = contents(root)
    assert {path: (state.st_mtime_ns, state.st_ino) for path, state in after.items()} == {
        path: (state.st_mtime_ns, state.st_ino) for path, state in before.items()
    }


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("header", "header"), ("payload", "checksum"), ("padding", "checksum"), ("short", "size"), ("empty", "size"),
        ("long", "size"), ("swapped", "header"), ("link", "header"), ("pipe", "header"), ("place", "place"),
    ],
)  # fmt: skip
def test_what_does_not_verify_is_found_and_repair_removes_it_and_nothing_else(root, capsys, kind, what):
    others = [path for path in object_files(root) if path != path_of(root, chain("p", 4)[4])]
    path = damage(root, kind)
    status, report = run(capsys, "fsck", root)
    assert status == 1
    assert (path.name, what, True) in findings(report)
    assert os.path.lexists(path)
    status, report = run(capsys, "fsck", root, "--repair")
    assert (status, report["num_problems_left"]) == (0, 0)
    assert not os.path.lexists(path)
    assert object_files(root) == sorted(others)
    assert run(capsys, "fsck", root)[1]["num_problems"] == 0
    assert (root.parent / "elsewhere").exists() == (kind == "link")


def test_what_lies_on_top_of_a_missing_chunk_is_unreachable(root, capsys):
    objects = chain("p", 4)
    path_of(root, objects[1]).unlink()
    status, report = run(capsys, "fsck", root)
    lost = {path_of(root, planned).name for planned in objects[2:]}
    assert status == 1
    assert {name for name, what, _ in findings(report) if what == "unreachable"} == lost
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert len(object_files(root)) == 4


def test_a_snapshot_needs_the_chunks_of_its_own_model(root, capsys):
    shutil.copytree(root / NAMESPACE.attention, root / ("e" * 64))
    shutil.rmtree(root / NAMESPACE.attention)
    _, report = run(capsys, "fsck", root)
    assert (path_of(root, chain("p", 4)[4]).name, "unreachable", True) in findings(report)


def test_an_object_without_one_ranks_file_is_incomplete(tmp_path, capsys):
    root = tmp_path / "root"
    with tier_pair(root, world_size=2) as made:
        made.store(chain("p", 2))
    made.path(chain("p", 2)[2], 1).unlink()
    status, report = run(capsys, "fsck", root)
    assert status == 1
    assert (path_of(root, chain("p", 2)[2]).name, "incomplete", True) in findings(report)
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert len(object_files(root)) == 4


def test_while_somebody_serves_what_may_be_on_its_way_is_a_note(root, capsys):
    with tier_pair(root) as made:
        made.recovered()
        made.store(chain("new", 1))
        path_of(root, chain("p", 4)[1]).unlink()
        status, report = run(capsys, "fsck", root, "--repair")
        assert status == 0
        assert {what for _, what, is_problem in findings(report) if not is_problem} == {"unreachable", "catalogue"}
        assert path_of(root, chain("p", 4)[2]).exists()


def test_modes_are_reported_and_put_right(root, capsys):
    paths = [path_of(root, chain("p", 4)[0]), root / NAMESPACE.attention, root]
    for path in paths:
        path.chmod(0o755)
    status, report = run(capsys, "fsck", root)
    assert status == 1
    assert [what for _, what, _ in findings(report)] == ["mode"] * 3
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o700, 0o700]


def test_leftovers_are_removed_when_their_writer_is_gone(root, capsys):
    directory = object_files(root)[0].parent
    living, old = directory / temporary_name(), root / ".tmp.00000000.1.2.3"
    dead = directory / re.sub(r"\d+\.\d+$", "1.0", living.name)  # the process of this number began at another time
    for path in (living, dead, old):
        path.write_bytes(b"half")
    for path in (living, old):  # the one's writer lives, and nobody here can say whether the other's does
        os.utime(path, (time.time() - 7200,) * 2)
    status, report = run(capsys, "fsck", root)
    assert status == 1
    assert findings(report) == sorted(
        [(living.name, "leftover", False), (dead.name, "leftover", True), (old.name, "leftover", True)]
    )
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert [path.exists() for path in (living, dead, old)] == [True, False, False]


def test_strangers_are_named_without_harm_to_the_terminal_and_left_alone(root, capsys):
    elsewhere = root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "ab").mkdir()
    (elsewhere / "ab" / ".tmp.99999999.1.2.3").write_bytes(b"mine")
    (root / ("f" * 64)).symlink_to(elsewhere)
    (root / NAMESPACE.attention / "zz").symlink_to(elsewhere)
    os.mkfifo(root / NAMESPACE.attention / "pipe")
    (root / ("n" * 255)).write_text("long")
    (root / "\x1b[2Jbell\a\n").write_text("steering")
    (root / os.fsdecode(b"\xff\xfe")).write_text("not text")
    (path_of(root, chain("p", 4)[0]).parent / "notes.txt").write_text("mine")
    (root / "members" / "fifo").mkdir()
    (root / "ledger" / "mine").write_text("not ours either")
    before = set(contents(root.parent))
    assert cli.main(["fsck", str(root), "--repair"]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[2Jbell\\x07\\n" in shown
    assert "\x1b" not in shown and "\a" not in shown
    status, report = run(capsys, "fsck", root, "--repair")
    assert status == 0
    assert [what for _, what, _ in findings(report)] == ["stranger"] * 9
    assert run(capsys, "gc", root, "--max-bytes", 0)[0] in (0, 1)
    assert set(contents(root.parent)) - before == set()
    assert (elsewhere / "ab" / ".tmp.99999999.1.2.3").exists()


def test_what_takes_the_place_of_a_members_lock_is_a_problem_for_the_operator(root, capsys):
    (root / "members" / "1").mkdir()
    status, report = run(capsys, "fsck", root, "--repair")
    assert (status, findings(report)) == (1, [("1", "stranger", True)])
    (root / "members" / "1").rmdir()
    assert run(capsys, "fsck", root)[0] == 0


@pytest.mark.parametrize("words", [b"{", b"[1]", b"[" * 100_000, b"\xff", b'{"x": "' + b"y" * (1 << 20) + b'"}'])
def test_a_hostile_namespace_json_is_a_note(root, capsys, words):
    (root / NAMESPACE.snapshot / "namespace.json").write_bytes(words)
    status, report = run(capsys, "fsck", root)
    assert (status, findings(report)) == (0, [("namespace.json", "manifest", False)])
    assert run(capsys, "stats", root)[0] == 0


def test_a_learned_json_that_cannot_be_used_is_a_note_and_one_that_can_is_none(root, capsys):
    write_learned(Device(), str(root), NAMESPACE.attention, ReuseModel().learned())
    assert findings(run(capsys, "fsck", root)[1]) == []
    (root / NAMESPACE.attention / "learned.json").write_bytes(b"{}")
    status, report = run(capsys, "fsck", root)
    assert (status, findings(report)) == (0, [("learned.json", "learned", False)])
    assert run(capsys, "stats", root)[0] == 0


def test_what_cannot_be_read_is_reported(root, capsys, monkeypatch):
    bad = str(path_of(root, chain("p", 4)[4]))

    class Refusing(Device):
        def open(self, path, flags):
            if path == bad:
                raise PermissionError(13, "Permission denied", path)
            return super().open(path, flags)

    report = fsck.Check(str(root), device=Refusing()).run()
    assert [(found.what, found.is_problem) for found in report.findings] == [("unreadable", True)]
    assert "Permission denied" in report.findings[0].detail


class Unreadable(Device):
    """Reads of the object with this name fail."""

    def __init__(self, name: str, times: int = 1 << 30) -> None:
        self._name, self._left, self._fds = name, times, set()

    def open(self, path, flags):
        fd = super().open(path, flags)
        (self._fds.add if path.endswith(self._name) else self._fds.discard)(fd)
        return fd

    def preadv(self, fd, segments, offset):
        if fd in self._fds and self._left:
            self._left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, segments, offset)


def test_repair_removes_neither_what_cannot_be_read_nor_what_builds_on_it(root):
    objects, files = chain("p", 4), object_files(root)
    device = Unreadable(path_of(root, objects[1]).name)
    report = fsck.Check(str(root), repair=True, device=device).run()
    assert object_files(root) == files
    assert sorted(found.what for found in report.problems) == ["unreachable"] * 3 + ["unreadable"]
    assert not report.is_sound
    assert fsck.Check(str(root), repair=True).run().is_sound


def test_repair_removes_no_object_of_which_one_ranks_file_cannot_be_read(tmp_path):
    root = tmp_path / "root"
    with tier_pair(root, world_size=2) as made:
        made.store(chain("p", 2))
    files = object_files(root)
    fsck.Check(str(root), repair=True, device=Unreadable(made.path(chain("p", 2)[0], 1).name)).run()
    assert object_files(root) == files


def test_repair_removes_nothing_that_builds_on_what_lies_in_a_directory_that_cannot_be_listed(root, monkeypatch):
    files, scandir = object_files(root), os.scandir
    unlisted = str(path_of(root, chain("p", 4)[1]).parent)

    def refuse(path):
        if path == unlisted:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return scandir(path)

    with monkeypatch.context() as patched:
        patched.setattr("os.scandir", refuse)
        assert not fsck.Check(str(root), repair=True).run().is_sound
    assert object_files(root) == files


def test_one_error_of_a_read_does_not_make_another_keys_checksums_wrong(tmp_path):
    key_file = tmp_path / "key"
    key_file.write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    root = tmp_path / "root"
    with tier_pair(root, integrity_key_file=str(key_file)) as made:
        made.store(chain("p", 2))
    files = object_files(root)
    for fingerprint in NAMESPACE.fingerprints:
        (root / fingerprint / "namespace.json").unlink()  # so either kind of checksum may be right
    device = Unreadable(files[0].name, times=1)
    fsck.Check(str(root), repair=True, device=device, integrity=integrity_of(str(key_file))).run()
    assert object_files(root) == files


@pytest.mark.parametrize(("before", "num_files"), [(NAMESPACE.attention, 7), (OTHER_NAMESPACE.attention, 8)])
def test_an_object_that_is_evicted_while_it_is_checked_is_no_finding(root, before, num_files):
    """Before its file is read, and after that."""
    snapshot = chain("p", 4)[4]

    class Evicting(Device):
        def open(self, path, flags):
            if before in path and path_of(root, snapshot).exists():
                forget_rows(root, [snapshot])
                path_of(root, snapshot).unlink()
            return super().open(path, flags)

    report = fsck.Check(str(root), device=Evicting()).run()
    assert (report.findings, report.num_files) == ([], num_files)


def test_an_object_that_is_stored_again_while_it_is_checked_is_no_finding(root):
    path = path_of(root, chain("p", 4)[4])
    right = path.read_bytes()
    damage(root, "payload")

    class Replacing(Device):
        def preadv(self, fd, segments, offset):
            count = super().preadv(fd, segments, offset)
            if offset and os.path.samestat(os.fstat(fd), path.stat()):
                path.write_bytes(right)
            return count

    assert fsck.Check(str(root), repair=True, device=Replacing()).run().findings == []
    assert path.read_bytes() == right
