# SPDX-License-Identifier: Apache-2.0
"""A vLLM that somebody has edited: every edited file is named, and no advice destroys an edit."""

import re

import pytest

from tests.patches.trees import (
    MINE,
    ORIGINALS,
    A,
    B,
    C,
    commands_in,
    contents,
    edit,
    make_tree,
    make_unpatched,
    run_command,
)
from vllm_overlay.patching import installed
from vllm_overlay.patching.advice import FileState
from vllm_overlay.patching.cli import main
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.tree import apply, reverse, status

DESTROYS = re.compile(
    r"reinstall vLLM|git\S* (-C \S+ )?(checkout|reset|restore|clean)|stash (drop|clear)|--force|\brm\b"
)


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
    assert status(tree, series).states == {A: FileState.EDITED, B: FileState.MISSING, C: FileState.UNREADABLE}
    said = refusal_of(apply, tree, series)
    assert f"edited      {A}" in said
    assert f"missing     {B}" in said
    assert f"unreadable  {C}" in said and "is not a file" in said


def test_a_tree_of_mostly_unknown_files_is_said_to_be_of_another_version(tree, series):
    """The tree does not say its version, as a git checkout, and most of the files are not those of the pin."""
    (tree / "PKG-INFO").unlink()
    edit(tree, A, B)
    assert status(tree, series).states == {A: FileState.EDITED, B: FileState.EDITED, C: FileState.ORIGINAL}
    said = refusal_of(apply, tree, series)
    assert f"edited  {A}" in said and f"edited  {B}" in said
    assert "probably another version" in said
    assert not DESTROYS.search(said)


def test_the_command_says_what_is_refused_and_how_to_keep_the_edits(tmp_path, capsys):
    tree = make_unpatched(tmp_path / "with blank")
    edited = ["vllm/lora/worker_manager.py", "vllm/v1/metrics/stats.py"]
    edit(tree, *edited)
    assert main(["--target", str(tree), "--check"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("The series would be refused: 2 files are not ")
    assert all(f"edited  {path}\n" in printed for path in edited)
    assert "--target" in printed and not DESTROYS.search(printed)
    assert main(["--target", str(tree)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("refused: 2 files are not ") and all(f"edited  {path}\n" in said for path in edited)
    assert main(["--target", str(tree), "--status"]) == 1
    assert "--check says how" in capsys.readouterr().out


@pytest.mark.parametrize("is_patched", [False, True])
def test_files_with_other_line_ends_are_told_with_the_command_that_mends_them(tree, series, is_patched):
    """As git leaves a checkout where core.autocrlf is set."""
    if is_patched:
        apply(tree, series)
    before = contents(tree)
    for path in A, C:
        (tree / path).write_bytes((tree / path).read_bytes().replace(b"\n", b"\r\n"))
    said = refusal_of(apply, tree, series)
    assert f"lines end with CRLF  {A}\n" in said and "core.autocrlf" in said and B not in said
    (command,) = commands_in(said)
    run_command(command)
    assert contents(tree) == before
    assert apply(tree, series).is_applied


def test_the_other_checkout_that_is_advised_takes_the_series_and_the_edits_stay(checkout, series):
    edit(checkout, C)
    (command,) = commands_in(refusal_of(apply, checkout, series), " worktree ")
    run_command(command)
    assert apply(checkout.parent / "vllm-0.32.0", series).is_applied
    assert (checkout / C).read_text() == ORIGINALS[C] + MINE


@pytest.mark.parametrize("is_patched", [False, True])
def test_without_git_the_archive_that_is_advised_holds_the_edits(tmp_path, series, is_patched):
    tree = make_tree(tmp_path / "with blank")
    if is_patched:
        apply(tree, series)
    before = contents(tree)
    edit(tree, A, C)
    (command,) = commands_in(refusal_of(apply, tree, series), "tar ")
    run_command(command, tmp_path)
    assert run_command(f"tar -xOf vllm-edits.tar {A} {C}", tmp_path).count(MINE) == 2
    if is_patched:  # then the originals are known, and back in their place
        assert apply(tree, series).is_applied and contents(tree) == before


def test_the_check_at_start_names_all_files_in_one_sentence_and_destroys_none(tree, series, is_installed):
    apply(tree, series)
    edit(tree, A)
    (tree / C).unlink()
    with pytest.raises(installed.UnpatchedError) as error:
        installed.require()
    problem = str(error.value)
    assert f"{A} (edited), {C} (missing)" in problem and "\n" not in problem
    assert "--installed --check" in problem and not DESTROYS.search(problem)
