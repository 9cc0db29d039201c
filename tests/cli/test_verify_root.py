# SPDX-License-Identifier: Apache-2.0
"""``vllm-overlay stats --verify``: every byte under a root is read as a load reads it."""

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.cli.damage import damage
from tests.tiers.disk.devices import Meanwhile
from tests.tiers.disk.files import object_files, on_disk
from tests.tiers.disk.foreign import contents_of
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, tier_pair
from vllm_overlay import cli
from vllm_overlay.tiers.disk.catalogue import Catalogue, Limits, Namespace
from vllm_overlay.tiers.disk.files.checksum import XXH3
from vllm_overlay.tiers.disk.files.device import Device
from vllm_overlay.tiers.disk.recovery import inspection
from vllm_overlay.tiers.disk.recovery.inspection import Inspection, Inspector


def verified(capsys, root, *options):
    status, report = run(capsys, "stats", root, "--verify", *options)
    return status, report["verified"]


def test_a_sound_root_verifies_and_is_not_touched(root, capsys):
    before = contents_of(root)
    status, found = verified(capsys, root, "--remove")
    assert (status, found["num_files"], found["num_bytes"], found["problems"]) == (0, 8, 8 * on_disk(), [])
    assert contents_of(root) == before


DAMAGES = {
    "header": "header", "payload": "checksum", "padding": "checksum", "short": "size", "empty": "size", "long": "size",
    "swapped": "header", "link": "header", "pipe": "header",
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_does_not_verify_is_said_and_removed_if_that_is_asked(root, capsys, kind):
    path = damage(root, kind)
    problem = {"path": str(path.relative_to(root)), "why": DAMAGES[kind], "is_bad": True, "is_removed": False}
    status, found = verified(capsys, root)
    assert (status, found["num_files"], found["problems"]) == (1, 7, [problem])
    assert os.path.lexists(path)
    status, found = verified(capsys, root, "--remove")
    assert (status, found["problems"]) == (0, [problem | {"is_removed": True}])
    assert not os.path.lexists(path)
    status, found = verified(capsys, root)
    assert (status, found["num_files"], found["num_missing"], found["problems"]) == (0, 7, 1, [])
    with tier_pair(root) as made:  # and the server goes on
        made.recovered()
        made.store_at_last(chain("another", 1)[0])


def test_for_people_each_file_has_a_line_that_cannot_steer_a_terminal(root, capsys):
    damage(root, "payload")
    assert cli.main(["stats", str(root), "--verify"]) == 1
    shown = capsys.readouterr().out
    assert "7 files" in shown and "1 do not" in shown and "wrong     checksum" in shown and "--remove removes" in shown
    assert all(line.isprintable() for line in shown.splitlines())


class Unreadable(Device):
    """One file has a bad sector."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def open(self, path, flags):
        if path == self._path:
            raise OSError(5, "Input/output error")
        return super().open(path, flags)


def inspected(root: Path, **options) -> Inspection:
    with contextlib.closing(Catalogue(str(root))) as catalogue:
        return Inspector(str(root), catalogue, XXH3, **options).run()


def test_a_file_that_cannot_be_read_is_said_and_stays(root):
    path = object_files(root)[0]
    found = inspected(root, remove=True, device=Unreadable(path))
    assert [(problem.why, problem.is_bad, problem.is_removed) for problem in found.problems] == [
        ("io_error", False, False)
    ]
    assert path.exists() and not found.is_sound


def test_a_file_that_is_too_large_for_memory_is_not_read(root, monkeypatch):
    monkeypatch.setattr(inspection, "MOST_BYTES", 1000)
    found = inspected(root, remove=True)
    assert {(problem.why, problem.is_removed) for problem in found.problems} == {("too_large", False)}
    assert len(object_files(root)) == 8


def test_what_is_evicted_meanwhile_is_no_problem(root):
    path = object_files(root)[0]

    def evict():
        path.write_bytes(b"")
        with contextlib.closing(Catalogue(str(root))) as catalogue:
            catalogue.join("f" * 16, Namespace(NAMESPACE.fingerprint))
            while catalogue.evict("f" * 16, Limits(1 << 40, 256), 0):
                pass

    found = inspected(root, device=Meanwhile(path, "close", evict))
    assert found.problems == []


def test_a_namespace_of_which_nobody_says_what_it_needs_is_left_alone(root, capsys):
    path = damage(root, "payload")
    with contextlib.closing(sqlite3.connect(root / "catalogue-1.sqlite")) as db, db:
        db.execute("UPDATE namespace SET words = ''")
    status, found = verified(capsys, root, "--remove")
    assert (status, found["num_files"], set(found["unverified"].values())) == (0, 0, {""})
    assert path.exists()


def test_a_bad_file_that_goes_before_it_is_removed_ends_no_run(root):
    path = object_files(root)[0]
    path.write_bytes(b"\0" * on_disk())
    found = inspected(root, remove=True, device=Meanwhile(path, "close", path.unlink))
    assert (found.num_files, [problem.is_removed for problem in found.problems]) == (7, [True])


def test_remove_alone_is_wrong_usage(root, capsys):
    assert cli.main(["stats", str(root), "--remove"]) == 2
    assert "give both" in capsys.readouterr().err


def test_only_its_owner_removes(root, monkeypatch, capsys):
    damage(root, "payload")
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    assert cli.main(["stats", str(root), "--verify", "--remove"]) == 2
    assert "run this as that user" in capsys.readouterr().err
    assert len(object_files(root)) == 8
