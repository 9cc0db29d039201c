# SPDX-License-Identifier: Apache-2.0
"""A vLLM that somebody has edited: every edited file is named, and no advice destroys an edit."""

import re
import shlex
import shutil
import subprocess

import pytest

from tests.patches.trees import ORIGINALS, A, B, C, contents, installed_originals, make_tree
from vllm_overlay.patching.check import PatchOutcome, check
from vllm_overlay.patching.cli import main
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.installed import verify_installed
from vllm_overlay.patching.series import load
from vllm_overlay.patching.states import FileState
from vllm_overlay.patching.tree import apply, reverse, status

DESTROYS = re.compile(
    r"reinstall vLLM|git\S* (-C \S+ )?(checkout|reset|restore|clean)|stash (drop|clear)|--force|\brm\b"
)
MINE = "# mine\n"


def edit(tree, *paths):
    for path in paths:
        (tree / path).write_text((tree / path).read_text() + MINE)


def git(tree, *arguments):
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", tree, *who, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done
    return done.stdout


@pytest.fixture
def checkout(tmp_path):
    """A git checkout: it does not say its version."""
    if shutil.which("git") is None:
        pytest.skip("no git here")
    tree = make_tree(tmp_path / "checkout", version=None)
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "vLLM")
    git(tree, "tag", "v0.32.0")
    return tree


def refusal_of(action, tree, series):
    before = contents(tree)
    with pytest.raises(PatchError) as error:
        action(tree, series)
    assert contents(tree) == before
    return str(error.value)


@pytest.mark.parametrize("action", [apply, reverse])
@pytest.mark.parametrize("is_patched", [False, True])
def test_every_edited_file_is_named_in_one_refusal(tree, series, action, is_patched):
    if is_patched:
        apply(tree, series)
    edit(tree, A, C)
    said = refusal_of(action, tree, series)
    assert f"edited  {A}\n" in said and f"edited  {C}\n" in said and B not in said
    assert "Nothing was changed" in said
    assert not DESTROYS.search(said)


def test_an_edited_file_a_missing_one_and_one_that_cannot_be_read_are_told_apart(tree, series):
    edit(tree, A)
    (tree / B).unlink()
    (tree / C).unlink()
    (tree / C).mkdir()
    assert status(tree, series).files == {A: FileState.EDITED, B: FileState.MISSING, C: FileState.UNREADABLE}
    said = refusal_of(apply, tree, series)
    assert f"edited      {A}" in said
    assert f"missing     {B}" in said
    assert f"unreadable  {C}" in said and "is not a file" in said


def test_files_of_another_version_are_not_called_edited(tree, series):
    """The tree does not say its version, as a git checkout, and most of the files are not those of the pin."""
    (tree / "PKG-INFO").unlink()
    edit(tree, A, B)
    found = status(tree, series)
    assert found.files == {A: FileState.OTHER_VERSION, B: FileState.OTHER_VERSION, C: FileState.ORIGINAL}
    said = refusal_of(apply, tree, series)
    assert f"another vLLM  {A}" in said and f"another vLLM  {B}" in said
    assert "2 of the 3" in said and "probably another version" in said
    assert "edited" not in said.splitlines()[0]
    assert not DESTROYS.search(said)
    assert check(tree, series).outcomes["0003-third.patch"] is PatchOutcome.APPLIES  # as for any other version


def test_a_tree_that_says_another_version_has_no_edited_files(tree, series):
    edit(tree, A)
    make_tree(tree, version="0.33.0", files={})
    assert status(tree, series).files[A] is FileState.OTHER_VERSION
    assert "vLLM 0.33.0" in refusal_of(apply, tree, series)


def test_check_says_of_each_patch_that_touches_an_edited_file_that_it_would_be_refused(tree, series):
    edit(tree, C)
    (tree / B).unlink()
    report = check(tree, series)
    assert dict(report.outcomes) == {
        "0001-first.patch": PatchOutcome.REFUSED,
        "0002-second.patch": PatchOutcome.REFUSED,
        "0003-third.patch": PatchOutcome.REFUSED,
    }
    assert dict(report.reasons) == {
        "0001-first.patch": f"{B} is missing",
        "0002-second.patch": f"{B} is missing",
        "0003-third.patch": f"{C} is edited",
    }
    (tree / B).write_text(ORIGINALS[B])
    report = check(tree, series)
    assert [str(outcome) for outcome in report.outcomes.values()] == ["applies", "applies", "would be refused"]
    assert not report.would_apply and C in report.refusal


def test_check_of_a_patched_tree_knows_what_is_in(tree, series):
    apply(tree, series)
    edit(tree, A)
    outcomes = check(tree, series).outcomes
    assert [str(outcome) for outcome in outcomes.values()] == ["would be refused", "already there", "would be refused"]


def test_the_command_says_how_many_patches_are_refused_and_how_to_keep_the_edits(tmp_path, capsys):
    files = {path: content.decode() for path, content in installed_originals(load()).items()}
    tree = make_tree(tmp_path / "with blank", files=files)
    edited = ["vllm/lora/worker_manager.py", "vllm/v1/metrics/stats.py"]
    edit(tree, *edited)
    touching = [patch.name for patch in load().patches if patch.paths.intersection(edited)]
    assert main(["--target", str(tree), "--check"]) == 1
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if "  would be refused  " in line] == touching
    assert f"would be refused: {len(touching)} of its {len(load().patches)} patches touch" in printed
    assert all(f"edited  {path}\n" in printed for path in edited)
    assert "--target" in printed and not DESTROYS.search(printed)
    assert main(["--target", str(tree)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("refused: 2 files of ") and all(f"edited  {path}\n" in said for path in edited)
    assert main(["--target", str(tree), "--status"]) == 1
    assert "--check says how" in capsys.readouterr().out


def commands_in(said):
    """The lines of advice that are commands, without what is said of them."""
    return [line.strip() for line in said.splitlines() if line.startswith("    ")]


def run_command(line):
    environment_of_git = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false"]
    line = line.replace("git ", f"git {shlex.join(environment_of_git)} ")
    done = subprocess.run(["sh", "-ec", line], capture_output=True, text=True)
    assert done.returncode == 0, done


@pytest.mark.parametrize("way", ["stash", "switch"])
@pytest.mark.parametrize("is_detached", [False, True])
def test_each_way_that_is_advised_for_a_checkout_works_and_keeps_the_edits(checkout, series, way, is_detached):
    if is_detached:
        git(checkout, "switch", "--quiet", "--detach", "v0.32.0")
    edit(checkout, C)
    (command,) = [line for line in commands_in(refusal_of(apply, checkout, series)) if f" {way} " in line]
    run_command(command)
    assert apply(checkout, series).is_applied
    reverse(checkout, series)
    kept = git(checkout, "show", f"stash@{{0}}:{C}" if way == "stash" else f"my-edits:{C}")
    assert kept == ORIGINALS[C] + MINE


def test_the_other_checkout_that_is_advised_takes_the_series_and_the_edits_stay(checkout, series):
    edit(checkout, C)
    (command,) = [line for line in commands_in(refusal_of(apply, checkout, series)) if " worktree " in line]
    run_command(command)
    assert apply(checkout.parent / "vllm-0.32.0", series).is_applied
    assert (checkout / C).read_text() == ORIGINALS[C] + MINE


def test_without_git_the_copy_that_is_advised_holds_the_edits(tmp_path, series, monkeypatch):
    tree = make_tree(tmp_path / "with blank")
    edit(tree, A, C)
    (command,) = [line for line in commands_in(refusal_of(apply, tree, series)) if line.startswith("tar ")]
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path)
    run_command(command)
    subprocess.run(["tar", "-xf", "vllm-edits.tar", "-C", "copy"], check=True)
    for path in A, C:
        assert (tmp_path / "copy" / path).read_text() == ORIGINALS[path] + MINE


def test_the_check_at_start_names_all_files_in_one_sentence_and_destroys_none(tree, series):
    apply(tree, series)
    edit(tree, A)
    (tree / C).unlink()
    problem = verify_installed(series, tree).problem
    assert f"{A} (edited), {C} (missing)" in problem and "\n" not in problem
    assert "--installed --check" in problem and not DESTROYS.search(problem)
