# SPDX-License-Identifier: Apache-2.0
"""A change of somebody's own to a file of the series: behind the series, and declared, both can be had."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patches.trees import (
    MINE,
    ORIGINALS,
    THREE_STEPS,
    A,
    B,
    C,
    commands_in,
    contents,
    edit,
    linked_originals,
    make_series,
    run_command,
)
from tests.python_path import REPOSITORY, python_path
from vllm_overlay.patching import installed
from vllm_overlay.patching.advice import FileState
from vllm_overlay.patching.diff import PatchError
from vllm_overlay.patching.replace import replace_files
from vllm_overlay.patching.series import Series
from vllm_overlay.patching.tree import apply, declare, refusal, reverse, status

SCHEDULER = "vllm/v1/core/sched/scheduler.py"


@pytest.fixture
def declared(tree: Path, series: Series) -> Path:
    """A tree with the series, and a declared change behind it in two files."""
    apply(tree, series)
    edit(tree, A, C)
    declare(tree, [A, C], series)
    return tree


def test_the_start_takes_exactly_what_was_declared(declared: Path, series: Series, is_installed: None) -> None:
    assert status(declared, series).states == {A: FileState.DECLARED, B: FileState.PATCHED, C: FileState.DECLARED}
    assert installed.require().endswith("2 files declared by the owner")
    edit(declared, C)
    with pytest.raises(installed.UnpatchedError, match=rf"{C} \(edited\)") as error:
        installed.require()
    assert "declare" in str(error.value) and A not in str(error.value)


def test_what_is_edited_behind_the_series_is_refused_with_the_command_that_declares_it(
    tree: Path, series: Series
) -> None:
    apply(tree, series)
    edit(tree, A, C)
    (command,) = commands_in(refusal(tree, series), "--declare")
    assert command.endswith(f"--target {tree} --declare {A} {C}")
    declare(tree, [A], series)
    (command,) = commands_in(refusal(tree, series), "--declare")
    assert command.endswith(f"--declare {C}")
    declare(tree, [C], series)
    assert not refusal(tree, series)


def test_to_apply_the_series_again_leaves_a_declared_file_alone(declared: Path, series: Series) -> None:
    before = contents(declared)
    assert apply(declared, series).is_applied
    assert contents(declared) == before
    replace_files(declared, {B: ORIGINALS[B].encode()})  # as a killed run leaves it
    assert status(declared, series).is_partial
    assert apply(declared, series).is_applied
    assert contents(declared) == before


def test_to_take_the_series_out_is_refused_until_the_change_is_kept_elsewhere(
    declared: Path, series: Series, tmp_path: Path
) -> None:
    before = contents(declared)
    with pytest.raises(PatchError, match="2 files hold changes that were declared by the owner") as error:
        reverse(declared, series)
    assert contents(declared) == before
    (command,) = commands_in(str(error.value), "tar ")
    run_command(command, tmp_path)
    assert reverse(declared, series).is_original
    assert not (declared / ".vllm-overlay").exists()
    kept = subprocess.run(["tar", "-xOf", "vllm-edits.tar", A, C], cwd=tmp_path, capture_output=True)
    assert kept.stdout == before[A] + before[C]


def test_to_take_the_change_out_again_needs_no_word(declared: Path, series: Series) -> None:
    replace_files(declared, {path: series.patched(path, ORIGINALS[path].encode()) for path in (A, C)})
    assert not status(declared, series).declared
    assert reverse(declared, series).is_original


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        (A, None, "is as the series leaves it"),
        (A, ORIGINALS[A], "vLLM's own) has no change behind the series"),
        (A, ORIGINALS[A] + MINE, "lacks 3 lines of the series, such as \"a = 'five'\""),
        ("vllm/other.py", None, "is none of the files that the series changes"),
        ("../secret", None, "is none of the files that the series changes"),
    ],
)
def test_only_a_change_behind_the_series_can_be_declared(
    tree: Path, series: Series, path: str, content: str | None, said: str
) -> None:
    apply(tree, series)
    edit(tree, C)
    if content is not None:
        (tree / path).write_text(content)
    with pytest.raises(PatchError) as error:
        declare(tree, [C, path], series)
    assert said in str(error.value) and path in str(error.value)
    assert not status(tree, series).declared


def test_a_change_in_a_tree_that_never_had_the_series_cannot_be_declared(tree: Path, series: Series) -> None:
    edit(tree, A)
    with pytest.raises(PatchError, match=r"\(edited\) has no change behind the series"):
        declare(tree, [A], series)


def test_another_series_takes_a_declaration_only_where_it_makes_the_same_of_the_file(
    declared: Path, tmp_path: Path
) -> None:
    next_series = make_series(tmp_path / "next", {**THREE_STEPS, "0004-next.patch": {A: ("a = 33\n", "a = 'more'\n")}})
    assert status(declared, next_series).states == {A: FileState.EDITED, B: FileState.PATCHED, C: FileState.DECLARED}
    said = refusal(declared, next_series)
    assert A in said and C not in said
    run_command(commands_in(said, "tar ")[0], tmp_path)
    assert apply(declared, next_series).declared == [C]


@pytest.mark.parametrize("is_detached", [False, True])
def test_in_a_checkout_the_commands_that_are_advised_give_both(
    checkout: Path, series: Series, is_detached: bool
) -> None:
    if is_detached:
        run_command("git switch --quiet --detach v0.32.0", checkout)
    (checkout / A).write_text(MINE + ORIGINALS[A])
    said = refusal(checkout, series)
    stash, apply_the_series, apply_the_change, declare_it = [
        line for line in commands_in(said) if " worktree " not in line
    ]
    run_command(stash)
    assert apply_the_series.endswith(f"--target {checkout}")
    apply(checkout, series)  # that of this test
    run_command(apply_the_change)
    assert declare_it.endswith(f"--target {checkout} --declare {A}")
    assert declare(checkout, [A], series).is_applied
    assert (checkout / A).read_text() == MINE + series.patched(A, ORIGINALS[A].encode()).decode()


def test_vllm_starts_with_a_declared_change_of_its_scheduler(tmp_path: Path) -> None:
    """A copy of the installed vLLM, the command line, the check at start, and vLLM's own import of the file."""
    root = linked_originals(tmp_path)
    start = (
        "from vllm_overlay.plugin import prepare_process; prepare_process();"
        "from vllm_overlay.patching.installed import require; print(require());"
        "from vllm.v1.core.sched import scheduler; print('imported', scheduler.MINE)"
    )

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": python_path(root)}
        return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)

    def patches(*arguments: str) -> subprocess.CompletedProcess[str]:
        return python(str(REPOSITORY / "tools" / "apply_patches.py"), "--installed", *arguments)

    assert patches().returncode == 0
    replace_files(root, {SCHEDULER: (root / SCHEDULER).read_bytes() + b"\nMINE = 17\n"})
    refused = python("-c", start)
    assert refused.returncode == 1 and f"{SCHEDULER} (edited)" in refused.stderr
    assert patches().returncode == 1
    assert f"--declare {SCHEDULER}" in patches("--check").stdout
    assert patches("--declare", SCHEDULER).stdout.endswith(", 1 file declared by the owner\n")
    assert patches("--check").stdout.endswith(", 1 file declared by the owner.\n")
    listed = {line.split()[0]: line for line in patches("--status").stdout.splitlines() if line.startswith("vllm/")}
    assert listed[SCHEDULER].endswith("  declared by the owner")
    started = python("-c", start)
    assert started.returncode == 0, started.stderr
    assert ", 1 file declared by the owner\nimported 17\n" in started.stdout
