# SPDX-License-Identifier: Apache-2.0
"""No command changes a directory that is no root, nor in a root what is not ours."""

import json

import pytest

from tests.cli.commands import run
from tests.tiers.disk.files import object_files, on_disk
from tests.tiers.disk.foreign import KINDS, contents_of, make_foreign, state_of
from vllm_overlay import cli, versions
from vllm_overlay.tiers.disk.files.marker import MARKER, encode_marker

COMMANDS = [["stats"], ["stats", "--verify", "--remove"]]
commands = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


@commands
@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_that_is_no_root_has_status_2_and_does_not_change(tmp_path, capsys, kind, command):
    directory = make_foreign(tmp_path / "theirs", kind)
    before = state_of(directory)
    assert cli.main([*command, str(directory)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"vllm-overlay: {directory} ") and "theirs/vllm-kv" in said.err
    assert said.out == ""
    assert state_of(directory) == before


@commands
def test_an_empty_directory_is_no_root_yet_and_does_not_change(tmp_path, capsys, command):
    (tmp_path / "lost+found").mkdir()
    tmp_path.chmod(0o1777)
    before = state_of(tmp_path)
    assert cli.main([*command, str(tmp_path)]) == 2
    assert "is empty: no server has used it" in capsys.readouterr().err
    assert state_of(tmp_path) == before


@commands
@pytest.mark.parametrize("what", ["nothing", "a file"])
def test_what_is_no_directory_is_said_with_what_to_give(tmp_path, capsys, what, command):
    path = tmp_path / "kv"
    if what == "a file":
        path.write_text("mine")
    assert cli.main([*command, str(path)]) == 2
    assert f"{str(path)!r} is no directory here: give the `root` of the disk tier's" in capsys.readouterr().err


@commands
def test_a_root_of_a_later_format_is_refused(root, capsys, command):
    later = {**json.loads(encode_marker("wal")), "version": versions.DISK_ROOT + 1, "written_by": "9.8.7"}
    (root / MARKER).write_text(json.dumps(later))
    before = state_of(root)
    assert cli.main([*command, str(root)]) == 2
    assert "vllm-overlay 9.8.7" in capsys.readouterr().err
    assert state_of(root) == before


@commands
def test_a_root_that_lost_its_marker_is_read_and_not_marked(root, capsys, command):
    (root / MARKER).unlink()
    before = contents_of(root)
    assert run(capsys, *command, root)[1]["num_bytes"] == 8 * on_disk()
    assert contents_of(root) == before


def test_what_is_not_ours_is_not_opened_and_stays(root, capsys):
    directory = object_files(root)[0].parent
    theirs = [root / ".tmp.foo", directory.parent / "mine", directory / "notes.txt"]
    for path in theirs:
        path.write_text("mine")
    assert run(capsys, "stats", root, "--verify", "--remove")[0] == 0
    assert [path.read_text() for path in theirs] == ["mine"] * 3
