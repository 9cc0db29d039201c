# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay fsck``: what the catalogue says against what the files are."""

import contextlib
import os
import sqlite3

import pytest

from tests.cli.commands import contents, findings, forget_rows, member, names, path_of, remove_catalogue, run
from tests.cli.damage import damage, flip
from tests.tiers.disk.files import object_files
from tests.tiers.disk.inside import is_member
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, OTHER_NAMESPACE, tier_pair
from tests.waiting import until
from vllm_overlay.common.file_lock import lock
from vllm_overlay.tiers.disk.catalogue import Catalogue, Limits, Namespace
from vllm_overlay.tiers.disk.catalogue.generations import begin, newest
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.files.listing import FoundObject
from vllm_overlay.tiers.disk.files.scan import FoundFile
from vllm_overlay.tiers.disk.maintenance import fsck
from vllm_overlay.tiers.disk.maintenance.guarded_catalogue import GuardedCatalogue
from vllm_overlay.tiers.disk.maintenance.rebuild import as_stored

P, Q = chain("p", 4), chain("q", 2)


def execute(root, *statements):
    with contextlib.closing(sqlite3.connect(root / "catalogue-1.sqlite", isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


def is_all_served(root):
    """Whether servers find all that the fixture stored, and load the right bytes."""
    with tier_pair(root) as made, tier_pair(root, namespace=OTHER_NAMESPACE) as other:
        made.recovered(), other.recovered()
        is_found = made.coverage(P) == [True] * 5 and other.coverage(Q) == [True] * 3
        return is_found and made.reasons(P) == [""] * 5 and other.reasons(Q) == [""] * 3


def rows_of(root):
    with contextlib.closing(Catalogue(str(root))) as catalogue:
        return {row.name for row in catalogue.find([*names(P), *names(Q, OTHER_NAMESPACE)])}


def test_a_row_without_its_file_is_a_problem_and_repair_removes_it_with_what_is_on_top(root, capsys):
    path_of(root, P[1]).unlink()
    status, report = run(capsys, "fsck", root)
    assert status == 1
    assert (path_of(root, P[1]).name, "catalogue", True) in findings(report)
    assert len(rows_of(root)) == 8
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert rows_of(root) == {*names(P[:1]), *names(Q, OTHER_NAMESPACE)}
    assert len(object_files(root)) == 4
    assert run(capsys, "fsck", root)[1]["findings"] == []


def test_a_row_without_one_ranks_file_is_a_problem(tmp_path, capsys):
    root = tmp_path / "root"
    with tier_pair(root, world_size=2) as made:
        made.store(P)
    missing = made.path(P[4], 1)
    missing.unlink()
    assert (missing.name, "catalogue", True) in findings(run(capsys, "fsck", root)[1])
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert rows_of(root) == {*names(P[:4])}


def test_a_file_without_a_row_is_a_problem_and_repair_makes_the_row(root, capsys):
    forget_rows(root, P[1:2])
    status, report = run(capsys, "fsck", root)
    assert (status, findings(report)) == (1, sorted((path_of(root, each).name, "catalogue", True) for each in P[1:]))
    files = object_files(root)
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert (len(rows_of(root)), object_files(root)) == (8, files)
    assert run(capsys, "fsck", root)[1]["findings"] == []
    with member(root) as catalogue:
        assert catalogue.totals().granted_bytes == 0
    assert is_all_served(root)


def test_files_of_a_namespace_that_the_catalogue_does_not_know_get_rows(root, capsys):
    forget_rows(root, P[:1])
    with member(root) as catalogue:
        assert set(catalogue.drop_empty_namespaces()) == set(NAMESPACE.fingerprints)
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert len(rows_of(root)) == 8


def test_what_a_killed_process_left_without_a_row_is_a_note(root, capsys):
    with contextlib.closing(Catalogue(str(root))) as killed:
        killed.join([Namespace(each, NAMESPACE.attention) for each in NAMESPACE.fingerprints], 1)
    forget_rows(root, P[4:])
    status, report = run(capsys, "fsck", root)
    assert (status, findings(report)) == (0, [(path_of(root, P[4]).name, "catalogue", False)])


def test_what_a_killed_gc_had_yet_to_unlink_is_a_note_and_the_next_server_unlinks_it(root, capsys):
    with contextlib.closing(Catalogue(str(root))) as killed:
        killed.join([], 1)
        assert len(killed.evict(Limits(1 << 30, 2, only_idle=True), 1)) == 2
    status, report = run(capsys, "fsck", root, "--repair")
    assert (status, [finding[1:] for finding in findings(report)]) == (0, [("catalogue", False)] * 2)
    assert len(object_files(root)) == 8
    with tier_pair(root) as made:
        made.recovered()
        until(lambda: len(object_files(root)) == 6, "the next server")
    assert run(capsys, "fsck", root)[1]["findings"] == []


def test_bytes_that_are_counted_wrong_are_put_right(root, capsys):
    execute(root, "UPDATE object SET num_bytes = num_bytes + 4096 WHERE id = 2",
            "UPDATE meta SET object_bytes = object_bytes + 4096")  # fmt: skip
    status, report = run(capsys, "fsck", root)
    assert (status, findings(report)) == (1, [(path_of(root, P[1]).name, "catalogue", True)])
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert run(capsys, "fsck", root)[1]["findings"] == []
    assert is_all_served(root)


def test_an_object_that_gets_no_row_holds_no_room(root):
    forget_rows(root, P[3:])
    (item,) = as_stored(NAMESPACE.snapshot, [_found(root, P[4])])
    with GuardedCatalogue(str(root), Device(), repair=True) as catalogue:
        assert not catalogue.adopt(item)  # its parent has no row
        totals = catalogue.ask(Catalogue.totals)
    assert totals.granted_bytes == 0


def test_repair_of_a_bad_file_removes_its_row_and_what_is_on_top(root, capsys):
    flip(path_of(root, P[0]), 4096)
    status, report = run(capsys, "fsck", root, "--repair")
    assert status == 0
    assert (path_of(root, P[0]).name, "checksum", True) in findings(report)
    assert "catalogue" not in {what for _, what, _ in findings(report)}  # rows went before files
    details = [found["detail"] for found in report["findings"] if not found["is_problem"]]
    assert details == ["4 objects on top of it were removed with it"]
    assert rows_of(root) == {*names(Q, OTHER_NAMESPACE)}
    assert len(object_files(root)) == 3
    assert run(capsys, "fsck", root)[1]["findings"] == []


def test_a_name_in_anothers_place_costs_the_object_of_that_name_nothing(root, capsys):
    path = path_of(root, P[0])
    wrong = path.parent.parent / ("00" if path.parent.name != "00" else "01") / path.name
    wrong.parent.mkdir(mode=0o700)
    wrong.write_bytes(path.read_bytes())
    wrong.chmod(0o600)
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert not wrong.exists()
    assert len(rows_of(root)) == len(object_files(root)) == 8


def _cut(root):
    os.truncate(root / "catalogue-1.sqlite", 8192)


def _link(root):
    (root / "catalogue-1.sqlite").rename(root.parent / "elsewhere")
    (root / "catalogue-1.sqlite").symlink_to(root.parent / "elsewhere")


DAMAGES = {
    "garbage": lambda root: (root / "catalogue-1.sqlite").write_bytes(b"garbage" * 1000),
    "empty": lambda root: (root / "catalogue-1.sqlite").write_bytes(b""),
    "cut": _cut,
    "link": _link,
    "counters": lambda root: execute(root, "UPDATE meta SET object_bytes = 5"),
    "children": lambda root: execute(root, "UPDATE object SET num_children = 7 WHERE id = 1"),
    "types": lambda root: execute(root, "UPDATE object SET tag = 'no tag' WHERE id = 3"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_catalogue_is_a_problem_and_repair_loses_no_object(root, capsys, kind):
    DAMAGES[kind](root)
    before = contents(root)
    status, report = run(capsys, "fsck", root)
    assert status == 1
    assert {(what, is_problem) for _, what, is_problem in findings(report)} >= {("catalogue", True)}
    assert set(contents(root)) == set(before)
    status, report = run(capsys, "fsck", root, "--repair")
    assert (status, report["num_objects"]) == (0, 8)
    assert newest(str(root)) == 2
    assert run(capsys, "fsck", root)[1]["num_problems"] == 0
    assert len(rows_of(root)) == 8
    assert is_all_served(root)


def test_a_catalogue_that_is_found_damaged_while_it_is_changed_is_made_anew(root, capsys):
    execute(root, "UPDATE object SET tag = 'no tag' WHERE id = 5")
    flip(path_of(root, P[3]), 4096)
    status, report = run(capsys, "fsck", root, "--repair")
    assert status == 0
    assert {what for _, what, _ in findings(report)} >= {"checksum", "catalogue"}
    assert run(capsys, "fsck", root)[1]["findings"] == []
    assert rows_of(root) == {*names(P[:3]), *names(Q, OTHER_NAMESPACE)}


def test_who_lives_may_serve_anything_while_a_damaged_catalogue_does_not_say(root, capsys):
    DAMAGES["garbage"](root)
    path_of(root, P[1]).unlink()
    fd = lock(str(root / "members" / "7"))
    try:
        status, report = run(capsys, "fsck", root, "--repair")
    finally:
        os.close(fd)
    on_top = [(path_of(root, planned).name, "unreachable", False) for planned in P[2:]]
    assert (status, findings(report)) == (0, sorted([("catalogue-1.sqlite", "catalogue", True), *on_top]))
    assert len(object_files(root)) == 7


def test_a_server_goes_on_with_the_catalogue_that_repair_made(root, capsys):
    with tier_pair(root) as made:
        made.recovered()
        until(lambda: is_member(made.tier), "a member")
        execute(root, "UPDATE meta SET object_bytes = 5")
        assert run(capsys, "fsck", root, "--repair")[0] == 0
        until(lambda: newest(str(root)) == 2 and is_member(made.tier), "a member of the new one")
        made.store_at_last(chain("new", 1)[0])
        assert made.reasons(P) == [""] * 5
    assert run(capsys, "fsck", root)[1]["findings"] == []


def test_a_damaged_catalogue_of_keyed_objects_is_left_to_servers_without_the_key(keyed, capsys):
    root = keyed.root
    DAMAGES["garbage"](root)
    files = object_files(root)
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    with member(root) as catalogue:
        assert not catalogue.totals().is_complete
    assert object_files(root) == files
    assert ("catalogue-2.sqlite", "catalogue", False) in findings(run(capsys, "fsck", root)[1])
    with tier_pair(root, **keyed.settings) as made:
        assert made.recovered().coverage(P) == [True] * 5


def test_rows_of_a_namespace_that_cannot_be_verified_are_no_findings(keyed, capsys):
    status, report = run(capsys, "fsck", keyed.root)
    assert (status, {what for _, what, _ in findings(report)}) == (0, {"key"})
    assert run(capsys, "fsck", keyed.root, "--integrity-key-file", keyed.key_file)[1]["findings"] == []


def test_a_missing_catalogue_is_a_note_and_is_not_made(root, capsys):
    remove_catalogue(root)
    for options in ([], ["--repair"]):
        status, report = run(capsys, "fsck", root, *options)
        assert (status, findings(report)) == (0, [("catalogue", "catalogue", False)])
        assert list(root.glob("catalogue*")) == []


def test_a_catalogue_that_does_not_know_all_files_yet_is_a_note(root, capsys):
    remove_catalogue(root)
    begin(str(root), 1)
    status, report = run(capsys, "fsck", root, "--repair")
    assert (status, findings(report)) == (0, [("catalogue-1.sqlite", "catalogue", False)])


def test_what_is_stored_while_it_is_checked_is_no_finding(root):
    class Storing(Device):
        is_stored = False

        def open(self, path, flags):
            if not self.is_stored:
                self.is_stored = True
                with tier_pair(root) as made:
                    made.recovered().store(chain("new", 2))
            return super().open(path, flags)

    assert fsck.Check(str(root), device=Storing()).run().findings == []


def test_what_gets_its_row_while_rows_are_read_is_no_finding(root):
    forget_rows(root, P[4:])
    missing = path_of(root, Q[2], OTHER_NAMESPACE)
    missing.unlink()
    (item,) = as_stored(NAMESPACE.snapshot, [_found(root, P[4])])

    class Committing(Device):
        def lstat(self, path):  # asked after all rows were read
            with member(root) as catalogue:
                catalogue.grant(item.num_bytes, item.num_bytes, 1 << 40)
                assert not catalogue.commit([item]).refused
            return super().lstat(path)

    report = fsck.Check(str(root), device=Committing()).run()
    assert [os.path.basename(finding.path) for finding in report.findings] == [missing.name]


def _found(root, planned):
    path = path_of(root, planned)
    state = path.stat()
    return FoundObject(planned, state.st_mtime, (FoundFile(str(path), path.name, state.st_size, state.st_mtime),))


def test_what_is_evicted_after_its_row_was_read_is_no_finding(root):
    path = path_of(root, P[4])
    flip(path, 4096)  # whose rows have no right file are looked at again

    class Evicting(Device):
        def lstat(self, name):
            if path.exists():
                forget_rows(root, P[4:])
                path.unlink()
            return super().lstat(name)

    report = fsck.Check(str(root), device=Evicting()).run()
    assert [finding.what for finding in report.findings] == ["checksum"]


def test_what_is_evicted_and_stored_again_after_its_row_was_read_is_no_finding(root):
    path = path_of(root, P[4])
    flip(path, 4096)

    class Evicted(Device):
        is_stored_again = False

        def lstat(self, name):
            if not self.is_stored_again:
                self.is_stored_again = True
                raise FileNotFoundError(2, "No such file or directory", name)
            return super().lstat(name)

    report = fsck.Check(str(root), device=Evicted()).run()
    assert [finding.what for finding in report.findings] == ["checksum"]


def test_repair_removes_no_row_while_something_cannot_be_read(root, monkeypatch):
    path_of(root, P[4]).unlink()
    unlisted, scandir = str(path_of(root, Q[0], OTHER_NAMESPACE).parent), os.scandir

    def refuse(path):
        if path == unlisted:
            raise OSError(5, "Input/output error")
        return scandir(path)

    with monkeypatch.context() as patched:
        patched.setattr("os.scandir", refuse)
        assert not fsck.Check(str(root), repair=True).run().is_sound
    assert len(rows_of(root)) == 8


def test_a_catalogue_that_is_locked_for_long_is_a_problem_without_a_repair(root, capsys, monkeypatch):
    monkeypatch.setattr(Catalogue.__init__, "__defaults__", (0.1,))
    damage(root, "payload")
    with contextlib.closing(sqlite3.connect(root / "catalogue-1.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        status, report = run(capsys, "fsck", root, "--repair")
    assert status == 1
    assert ("catalogue", "catalogue", True) in findings(report)
    assert f"process {os.getpid()}" in str(report["findings"])
    assert newest(str(root)) == 1
