# SPDX-License-Identifier: Apache-2.0
"""No command changes a directory that is no root, nor in a root what is not ours."""

import json
import os

import pytest

from tests.cli.commands import findings, path_of, run
from tests.tiers.disk.files import object_files
from tests.tiers.disk.foreign import KINDS, contents_of, forget_marker, make_foreign, state_of
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, tier_pair
from vllm_overlay import cli, versions
from vllm_overlay.common.file_lock import lock
from vllm_overlay.tiers.disk.files.device import temporary_name
from vllm_overlay.tiers.disk.files.marker import MARKER, encode_marker
from vllm_overlay.tiers.disk.files.recognition import LEDGER_MAGIC

COMMANDS = [["stats"], ["fsck"], ["fsck", "--repair"], ["gc", "--max-bytes", "0"], ["gc", "--max-bytes=0", "--dry-run"]]
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
def test_a_root_of_a_later_format_is_refused(root, capsys, command):
    later = {**json.loads(encode_marker()), "version": versions.DISK_ROOT + 1, "written_by": "9.8.7"}
    (root / MARKER).write_text(json.dumps(later))
    before = state_of(root)
    assert cli.main([*command, str(root)]) == 2
    assert "vllm-overlay 9.8.7" in capsys.readouterr().err
    assert state_of(root) == before


def test_looking_at_an_old_root_marks_nothing_and_repair_marks_it(root, capsys):
    forget_marker(root)
    before = contents_of(root)
    assert run(capsys, "stats", root)[0] == 0
    assert run(capsys, "gc", root, "--max-bytes", 0, "--dry-run")[1]["removed_files"] == 8
    status, report = run(capsys, "fsck", root)
    assert (status, findings(report)) == (0, [(MARKER, "marker", False)])
    assert contents_of(root) == before
    status, report = run(capsys, "fsck", root, "--repair")
    assert (status, report["num_objects"]) == (0, 8)
    assert (root / MARKER).read_bytes() == encode_marker()
    assert run(capsys, "fsck", root)[1]["findings"] == []


@pytest.fixture
def root_of_before(root):
    """As versions before 0.3.0 left it: with a ledger and leases, without a catalogue."""
    forget_marker(root)
    for path in (*root.glob("catalogue*"), *(root / "members").iterdir()):
        path.unlink()
    (root / "members").rmdir()
    (root / "ledger").rmdir()
    (root / "ledger").write_bytes(LEDGER_MAGIC + bytes(2056))
    (root / "leases").mkdir(mode=0o700)
    (root / "leases" / "0").touch()
    return root


def test_looking_at_a_root_of_before_catalogues_makes_none(root_of_before, capsys):
    root = root_of_before
    before = state_of(root)
    _, stats = run(capsys, "stats", root)
    assert {namespace["is_in_use"] for namespace in stats["namespaces"]} == {None}
    assert run(capsys, "gc", root, "--max-bytes", 0, "--dry-run")[1]["removed_files"] == 8
    status, report = run(capsys, "fsck", root)
    assert (status, findings(report)) == (0, [("catalogue", "catalogue", False), (MARKER, "marker", False)])
    assert state_of(root) == before


def test_gc_and_repair_take_a_root_of_before_over(root_of_before, capsys):
    root = root_of_before
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert (root / "ledger").is_dir() and not (root / "leases").exists()
    assert run(capsys, "gc", root, "--max-bytes", 0)[0] == 0
    assert object_files(root) == []


@pytest.mark.parametrize("command", [["fsck", "--repair"], ["gc", "--max-bytes", "0"]], ids=" ".join)
def test_a_root_that_a_version_of_before_uses_is_refused_and_does_not_change(root_of_before, capsys, command):
    root = root_of_before
    fd = lock(str(root / "leases" / "0"))
    try:
        before = state_of(root)
        assert cli.main([*command, str(root)]) == 2
        assert "before 0.3.0" in capsys.readouterr().err
        assert state_of(root) == before
    finally:
        os.close(fd)


def test_gc_marks_an_old_root(root, capsys):
    forget_marker(root)
    assert run(capsys, "gc", root, "--max-bytes", 0)[0] == 0
    assert object_files(root) == []
    assert (root / MARKER).read_bytes() == encode_marker()


def test_a_damaged_marker_is_a_problem_and_repaired(root, capsys):
    (root / MARKER).write_text("{")
    status, report = run(capsys, "fsck", root)
    assert (status, findings(report)) == (1, [(MARKER, "marker", True)])
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert (root / MARKER).read_bytes() == encode_marker()


def test_the_markers_mode_is_put_right(root, capsys):
    (root / MARKER).chmod(0o644)
    status, report = run(capsys, "fsck", root)
    assert (status, findings(report)) == (1, [(MARKER, "mode", True)])
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert (root / MARKER).stat().st_mode & 0o7777 == 0o600


def test_strangers_temporaries_are_notes_and_stay(root, capsys):
    directory = object_files(root)[0].parent
    theirs = [root / ".tmp.foo", root / NAMESPACE.attention / ".tmp.1.2", directory / ".tmp.99999999.1.2"]
    for path in theirs:
        path.write_text("mine")
        os.utime(path, (1, 1))
    status, report = run(capsys, "fsck", root, "--repair")
    assert (status, findings(report)) == (0, sorted((path.name, "stranger", False) for path in theirs))
    assert run(capsys, "gc", root, "--max-bytes", 0)[0] == 0
    assert [path.read_text() for path in theirs] == ["mine"] * 3


@pytest.mark.parametrize("is_key_given", [True, False])
def test_repair_leaves_a_shared_root_shared(tmp_path, capsys, key_file, is_key_given):
    root = tmp_path / "shared"
    with tier_pair(root, integrity_key_file=str(key_file)) as made:
        made.tier.advance()
    namespace = root / NAMESPACE.attention
    for fingerprint in NAMESPACE.fingerprints:  # its server made them, or removed them when it ended
        (root / fingerprint).mkdir(exist_ok=True)
    (namespace / "namespace.json").write_text(
        json.dumps({"attention": NAMESPACE.attention, "description": {"integrity": "blake3:0011223344556677"}})
    )
    modes = {root: 0o2770, namespace: 0o2775, root / NAMESPACE.snapshot: 0o700}
    for path, mode in modes.items():
        path.chmod(mode)
    key = ["--integrity-key-file", str(key_file)] if is_key_given else []
    namespace.chmod(0o2777)
    _, report = run(capsys, "fsck", root, "--repair", *key)
    assert [name for name, what, _ in findings(report) if what == "mode"] == [namespace.name]
    assert {path: path.stat().st_mode & 0o7777 for path in modes} == {**modes, namespace: 0o2770}


def test_repair_closes_a_root_that_is_open_to_its_group_without_a_key(root, capsys):
    root.chmod(0o770)
    assert run(capsys, "fsck", root)[0] == 1
    assert run(capsys, "fsck", root, "--repair")[0] == 0
    assert root.stat().st_mode & 0o7777 == 0o700


def test_a_living_servers_temporary_is_no_stranger(root, capsys):
    living = path_of(root, chain("p", 4)[0]).parent / temporary_name()
    living.write_text("on its way")
    assert findings(run(capsys, "fsck", root, "--repair")[1]) == [(living.name, "leftover", False)]
